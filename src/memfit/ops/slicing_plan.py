"""Slices into which each op of a step is cut: tiles of an image, else samples of the batch, or rows of the logits.

All ops are cut alike as far as possible, since only ops that are cut alike can be fused (`memfit.ir.fusion`). So the
batch of a step is one number that divides as many bytes of the results as possible; for one long sequence, it is the
number of tokens. The logits of a language model over its vocabulary are the largest tensor and need no whole samples:
they are cut into rows. Times come later, from the profiler.

Known limits: one grid and one batch for a step. An op that is too small for its tiles is cut into samples. An op that
the batch does not divide is cut along its own first axis; it then runs together with ops of the same cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import looks_alike, outer_axis, results_of
from memfit.ir.slicing import BySlices
from memfit.ops.batching.sampling import Sampling, sampling_of
from memfit.ops.batching.slices import ViewOfSlice, accumulates, samples_per_slice
from memfit.ops.registry import sums_of
from memfit.ops.tiling.tile import Tiling
from memfit.ops.tiling.tiled import reaches_of, tiling_of

__all__ = ["Cutting", "batches_alike", "cutting"]

_aten = torch.ops.aten

_AXES = 2
"""Number of axes of space that a grid covers."""

_LEAST_EXTENT = 2
"""Smallest extent of a tile along an axis."""

_MOST = 0.9
"""A batch must divide this share of the bytes that the best batch divides: more samples are better than a few bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How the ops of a step are cut.

    Attributes:
        batches: batch size of each call that runs on samples.
        samples: number of samples per slice, by batch size.
        grid: number of tiles along each axis of space; trailing axes without a cut are left out.
        storage_of: storage of each node.
        base_of: returns the result that a node's memory was made for.
    """

    batches: Mapping[fx.Node | Call, int]
    samples: Mapping[int, int]
    grid: tuple[int, ...]
    storage_of: Mapping[fx.Node, int]
    base_of: Callable[[fx.Node], fx.Node]

    def slices(self, call: fx.Node | Call, results: Mapping[int, int], *, first: bool) -> BySlices | None:
        """How a call is cut; None if it runs whole only.

        Args:
            call: the call.
            results: storages of its results, with their positions among the results.
            first: whether the first run of the call may be cut.
        """
        tiling = self._tiling(call)
        sums = tuple(storage for storage, place in results.items() if place in sums_of(call))
        if tiling is not None:
            place_of = {
                self.storage_of[node]: place for place, node in enumerate(tiling.operands) if self._looks_as_made(node)
            }
            return BySlices(
                batch=int(tiling.operands[0].meta["val"].shape[0]),
                samples=1,
                seconds=0.0,
                workspace_bytes=0,
                reads=tuple(place_of),
                sums=sums,
                first=first,
                grid=self.grid,
                extents=tiling.extents,
                reaches=tuple(reaches_of(tiling, place) for place in place_of.values()),
            )
        batch = self.batches.get(call)
        sampling = None if batch is None else sampling_of(call, batch)
        if batch is None or sampling is None or not (first or _own_their_memory(sampling, batch)):
            return None
        passed_on = [node for node, axis in sampling.operands.items() if self._has_samples(node, batch, axis)]
        if not self._are_passed_on(call, passed_on):
            return None
        return BySlices(
            batch=batch,
            samples=self.samples[batch],
            seconds=0.0,
            workspace_bytes=0,
            reads=tuple(dict.fromkeys(self.storage_of[node] for node in passed_on)),
            sums=sums,
            first=first,
            accumulates=accumulates(call),
        )

    def _tiling(self, call: fx.Node | Call) -> Tiling | None:
        tiling = tiling_of(call, len(self.grid)) if self.grid else None
        if tiling is None or not self._are_passed_on(call, set(filter(self._looks_as_made, tiling.operands))):
            return None
        large = all(n >= _LEAST_EXTENT * tiles for n, tiles in zip(tiling.extents, self.grid, strict=True))
        return tiling if large else None

    def _has_samples(self, node: fx.Node, batch: int, axis: int) -> bool:
        """Whether the samples of a node along an axis lie where the samples of its base result lie."""
        return ViewOfSlice.of(self.base_of(node).meta["val"], node.meta["val"], batch, axis) is not None

    def _looks_as_made(self, node: fx.Node) -> bool:
        """Whether a node is the result that its memory was made for, or a view with the same layout."""
        return looks_alike(node.meta["val"], self.base_of(node).meta["val"])

    def _are_passed_on(self, call: fx.Node | Call, passed_on: Collection[fx.Node]) -> bool:
        """Whether no storage that the call reads in slices is also read whole."""
        whole = {self.storage_of.get(node) for node in call.all_input_nodes if node not in passed_on}
        return whole.isdisjoint(self.storage_of[node] for node in passed_on)


def cutting(
    calls: Sequence[fx.Node | Call],
    grid: Sequence[int],
    storage_of: Mapping[fx.Node, int],
    base_of: Callable[[fx.Node], fx.Node],
) -> Cutting:
    """Decides how calls are cut, given the tiles of a grid and optionally the parts of a batch; see `Cutting`."""
    tiles, parts = grid[:_AXES], grid[_AXES:]
    axes = max((axis for axis, count in enumerate(tiles, 1) if count > 1), default=0)
    batches = batches_alike(calls) if grid else _batches(calls, common=0, vocabularies={})
    samples = {batch: -(-batch // parts[0]) for batch in batches.values()} if parts else samples_per_slice(batches)
    return Cutting(
        batches=batches,
        samples=samples,
        grid=tuple(tiles[:axes]),
        storage_of=storage_of,
        base_of=base_of,
    )


def _own_their_memory(sampling: Sampling, batch: int) -> bool:
    """Whether operands lie in memory as the profiler's operands do; every bit may depend on that."""
    return all(outer_axis(node.meta["val"], batch) == axis for node, axis in sampling.operands.items())


def batches_alike(calls: Sequence[fx.Node | Call]) -> dict[fx.Node | Call, int]:
    """The batch size of each call that runs on samples, the same for as many calls as possible."""
    return _batches(calls, common=_common_batch(calls), vocabularies=_vocabularies(calls))


def _batches(
    calls: Sequence[fx.Node | Call], *, common: int, vocabularies: Mapping[int, int]
) -> dict[fx.Node | Call, int]:
    """Batch sizes of calls; a call that neither the `common` batch nor `vocabularies` fit uses its own first axis."""
    found: dict[fx.Node | Call, int] = {}
    for call in calls:
        tensors = _tensors(call)
        rows = {vocabularies[t.numel()] for t in tensors if t.numel() in vocabularies}
        own = next((int(t.shape[0]) for t in tensors if t.dim()), 0)
        for batch in (*rows, common, own):
            if sampling_of(call, batch) is not None:
                found[call] = batch
                break
    return found


def _common_batch(calls: Sequence[fx.Node | Call]) -> int:
    """The largest number that divides nearly all bytes that calls make; 0 if they make only matrices."""
    made = [
        t
        for call in calls
        for place, t in enumerate(results_of(call))
        if isinstance(t, torch.Tensor) and place not in sums_of(call)
    ]
    samples = {int(t.shape[0]) for t in made if t.dim() > 2} - {0, 1}
    tokens = {int(t.shape[1]) for t in made if t.dim() == 3 and t.shape[0] == 1} - {0, 1}

    divided = {
        batch: sum(t.numel() * t.element_size() for t in made if outer_axis(t, batch) is not None)
        for batch in samples or tokens
    }
    most = max(divided.values(), default=0)
    return max((batch for batch, nbytes in divided.items() if nbytes >= _MOST * most), default=0)


def _vocabularies(calls: Sequence[fx.Node | Call]) -> dict[int, int]:
    """The number of rows of the tensors that losses are computed from, by their number of elements."""
    losses = [call for call in calls if call.target is _aten.nll_loss_forward.default]
    data = [call.all_input_nodes[0].meta["val"] for call in losses]
    return {int(t.numel()): int(t.shape[0]) for t in data if t.dim() == 2}


def _tensors(call: fx.Node | Call) -> list[torch.Tensor]:
    """Tensors that the call makes, except sums, then tensors that it reads."""
    made = [t for place, t in enumerate(results_of(call)) if place not in sums_of(call)]
    read = [node.meta.get("val") for node in call.all_input_nodes]
    return [t for t in (*made, *read) if isinstance(t, torch.Tensor)]
