"""Into what slices each op of a step is cut: tiles of an image, or else samples of the batch.

All ops are cut alike as far as they can be, since only then they run as one (`memfit.step.fusion`). Times come later,
from the profiler.

Known limits: one grid for a step. What is too small for its tiles is cut into samples, and then runs with others such.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from memfit.capture.again import Call
from memfit.capture.by_samples import accumulates, batch_of, samples_per_slice, sliced_operands, sums_of
from memfit.capture.by_tiles import Tiling, reaches_of, tiling_of
from memfit.step.graph import BySlices

__all__ = ["Cutting", "cutting"]

_LEAST_EXTENT = 2
"""Of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How the ops of a step are cut.

    Attributes:
        samples: by size of the batch, how many a slice has.
        grid: how many tiles there are along each axis of space, axes without a cut left out at the end.
        storage_of: of each node.
        is_base: whether a node, or what a hollow one stands for, is the result that its memory was made for, or a view
            of the same shape.
    """

    samples: Mapping[int, int]
    grid: tuple[int, ...]
    storage_of: Mapping[fx.Node, int]
    is_base: Callable[[fx.Node], bool]

    def slices(self, call: fx.Node | Call, results: Mapping[int, int], *, first: bool) -> BySlices | None:
        """How a call is cut; None if it runs whole only.

        Args:
            call: the call.
            results: its storages, with their place among its results.
            first: whether its first run may be cut.
        """
        tiling = self._tiling(call)
        operands: Collection[fx.Node] = sliced_operands(call) if tiling is None else tiling.operands
        batch = batch_of(call) if tiling is None else int(tiling.operands[0].meta["val"].shape[0])
        if tiling is None and (batch not in self.samples or not self._are_handed_on(call, operands)):
            return None
        place_of = {self.storage_of[node]: place for place, node in enumerate(operands) if self.is_base(node)}
        return BySlices(
            batch=batch,
            samples=self.samples[batch] if tiling is None else 1,
            seconds=0.0,
            workspace_bytes=0,
            reads=tuple(place_of),
            sums=tuple(storage for storage, place in results.items() if place in sums_of(call)),
            first=first,
            accumulates=tiling is None and accumulates(call),
            grid=() if tiling is None else self.grid,
            extents=() if tiling is None else tiling.extents,
            reaches=() if tiling is None else tuple(reaches_of(tiling, place) for place in place_of.values()),
        )

    def _tiling(self, call: fx.Node | Call) -> Tiling | None:
        tiling = tiling_of(call, len(self.grid)) if self.grid else None
        if tiling is None or not self._are_handed_on(call, tiling.operands):
            return None
        large = all(n >= _LEAST_EXTENT * tiles for n, tiles in zip(tiling.extents, self.grid, strict=True))
        return tiling if large else None

    def _are_handed_on(self, call: fx.Node | Call, operands: Collection[fx.Node]) -> bool:
        """Whether of each operand slices are taken as they are made, or of a view of it whole, and not both."""
        made = {node for node in operands if self.is_base(node)}
        whole = {self.storage_of.get(node) for node in call.all_input_nodes if node not in made}
        return whole.isdisjoint(self.storage_of[node] for node in made)


def cutting(
    calls: Sequence[fx.Node | Call],
    grid: Sequence[int],
    storage_of: Mapping[fx.Node, int],
    is_base: Callable[[fx.Node], bool],
) -> Cutting:
    """How calls that may be cut are cut, given the tiles of a grid; see `Cutting`."""
    axes = max((axis for axis, tiles in enumerate(grid, 1) if tiles > 1), default=0)
    return Cutting(samples=samples_per_slice(calls), grid=tuple(grid[:axes]), storage_of=storage_of, is_base=is_base)
