"""Cost of one call slice by slice, measured alone on made-up operands, and whether slices equal those of the whole.

Slices of a recomputed op must have the bits of the whole; for the lever `tile` they must be equal up to rounding.

Known limits: as those of `memfit.profiling.benchmark`.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from msgspec import structs
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import results_in, results_of
from memfit.ir.graph import Variant
from memfit.ir.slicing import BySlices
from memfit.ops.batching.sampling import sampling_of
from memfit.ops.batching.slices import accumulates, samples_between
from memfit.ops.registry import sums_of
from memfit.ops.tiling.tile import Tiling
from memfit.ops.tiling.tiled import tiling_of
from memfit.ops.tiling.window import SPACE, Tile, narrowed, tiles_of
from memfit.profiling.one_run import equal, measured, timed
from memfit.profiling.synthetic_inputs import operand_values

__all__ = ["costs_in_slices", "same_slices"]

log = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Bytes of the widest vectors; allocations start at multiples of it."""

_WARM = 8
"""Number of slices that are timed one right after the other."""


def costs_in_slices(call: fx.Node | Call, slices: BySlices, device: torch.device) -> tuple[Variant, ...]:
    """Costs of a call that runs slice by slice.

    Args:
        call: the call.
        slices: how the call runs slice by slice. If its first run does too, or if it runs in tiles, the results need to
            be those of the whole up to rounding only.
        device: device to run on.

    Returns:
        The cost of all slices, with the workspace of one, then the costs of putting the slices of the first result
        together, in fresh memory and in memory that was used before; empty if the results are not those of the whole.
    """
    try:
        values = operand_values(call, device)
        args, kwargs = fx.map_arg(call.args, values.__getitem__), fx.map_arg(call.kwargs, values.__getitem__)
        whole = cast(Callable[..., object], call.target)(*args, **kwargs)
        is_rounded = slices.first or bool(slices.grid)
        return (_rounded_slices if is_rounded else same_slices)(call, slices, values, whole, device)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:  # a slice is too small for the kernel, say
        log.info("cannot run %s slice by slice (%s)", call.name, error)
        return ()


def same_slices(
    call: fx.Node | Call, slices: BySlices, values: Mapping[fx.Node, torch.Tensor], whole: object, device: torch.device
) -> tuple[Variant, ...]:
    """`costs_in_slices` where slices must have the bits of the whole.

    The kernel depends on shapes and on where operands lie in memory, so the first slice, one in the middle, the last
    and one of each alignment are compared with the whole.
    """
    run, cuts, axes = _slice_runner(call, slices, values, device), _cuts(slices), _axes_ofresults_in(call, slices)
    wholes = results_in(whole)
    _, first = measured(lambda: run(cuts[0]), device)
    times: list[float] = []
    sampling = sampling_of(call, slices.batch)
    operands = [(values[node], axis) for node, axis in sampling.operands.items()] if sampling is not None else []
    aligned = {tuple(c.samples_of(t, axis).data_ptr() % _ALIGNMENT for t, axis in operands): c for c in reversed(cuts)}
    for cut in dict.fromkeys((*aligned.values(), cuts[0], cuts[len(cuts) // 2], cuts[-1])):
        results = list[object]()
        times.append(timed(functools.partial(_run_into, results, run, cut), device))
        chunks = [cut.of(result, axis) for result, axis in zip(wholes, axes, strict=True)]
        if not equal(chunks, list(results_in(results[0]))):
            return ()
    variant = structs.replace(first, seconds=statistics.median(times) * len(cuts))
    return (variant, *_together(cast(torch.Tensor, wholes[0]), axes[0], cuts, device))


def _rounded_slices(
    call: fx.Node | Call, slices: BySlices, values: Mapping[fx.Node, torch.Tensor], whole: object, device: torch.device
) -> tuple[Variant, ...]:
    """`costs_in_slices` where slices equal the whole up to rounding, including sums over slices."""
    run, cuts, sums = _slice_runner(call, slices, values, device), _cuts(slices), sums_of(call)
    wholes, axes = results_in(whole), _axes_ofresults_in(call, slices)
    rounded = (t.dtype for t in values.values() if t.is_floating_point() or t.is_complex())
    eps = max((torch.finfo(dtype).eps for dtype in rounded), default=0.0)
    added: dict[int, torch.Tensor] = {}
    seconds = 0.0
    _, variant = measured(lambda: run(cuts[len(cuts) // 2]), device)
    _, at_border = measured(lambda: run(cuts[0]), device)  # padded, but with a smaller halo
    variant = structs.replace(variant, workspace_bytes=max(variant.workspace_bytes, at_border.workspace_bytes))
    for cut in cuts:
        results = list[object]()
        seconds += timed(functools.partial(_run_into, results, run, cut), device)
        for place, part in enumerate(results_in(results[0])):
            if accumulates(call):
                added[place] = cast(torch.Tensor, part)
            elif place in sums and isinstance(part, torch.Tensor):
                added[place] = part if place not in added else added[place] + part
            elif not _close(cut.of(wholes[place], axes[place]), part, eps):
                log.warning("%s in slices is not what it is whole; it runs whole", call.name)
                return ()
    if not all(_close(wholes[place], total, eps) for place, total in added.items()):
        log.warning("%s in slices does not add up to what it is whole; it runs whole", call.name)
        return ()
    # The slices compared with the whole start with cold caches; in a step, each slice finds warm caches.
    sample = cuts[max(0, len(cuts) // 2 - _WARM // 2) :][:_WARM]
    warm = sum(timed(functools.partial(run, cut), device) for cut in sample) * len(cuts) / len(sample)
    variant = structs.replace(variant, seconds=min(seconds, warm))
    if wholes[0] is None or 0 in sums:
        free = Variant(chunks=1, seconds=0.0, workspace_bytes=0)
        return variant, free, free
    return (variant, *_together(cast(torch.Tensor, wholes[0]), axes[0], cuts, device))


@dataclass(frozen=True, slots=True)
class _Cut:
    """The place of a slice: samples of the batch from `start` to before `stop`, and the number of a tile in a grid."""

    start: int
    stop: int
    batch: int
    number: int
    grid: tuple[int, ...]

    def samples_of(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """The samples of this slice in a whole tensor."""
        return samples_between(tensor, axis, self.batch, self.start, self.stop)

    def of(self, result: object, axis: int | None) -> object:
        """The slice of a whole result."""
        if not isinstance(result, torch.Tensor) or axis is None:
            return result
        return narrowed(self.samples_of(result, axis), self.tile(result.shape[SPACE : SPACE + len(self.grid)]))

    def tile(self, extents: Sequence[int]) -> Tile:
        """The tile of a tensor with these extents."""
        return tiles_of(extents, self.grid)[self.number]


def _cuts(slices: BySlices) -> list[_Cut]:
    starts = range(0, slices.batch, slices.samples)
    return [
        _Cut(start, min(start + slices.samples, slices.batch), slices.batch, number, slices.grid)
        for start in starts
        for number in range(math.prod(slices.grid))
    ]


def _slice_runner(
    call: fx.Node | Call, slices: BySlices, values: Mapping[fx.Node, torch.Tensor], device: torch.device
) -> Callable[[_Cut], object]:
    """Function that runs a call on a slice."""
    tiling = tiling_of(call, len(slices.grid)) if slices.grid else None
    if tiling is not None:
        return lambda cut: _run_tile(call, tiling, values, cut)
    sampling = sampling_of(call, slices.batch)
    assert sampling is not None, f"{call.name} does not run on samples"
    totals: list[torch.Tensor] = []

    def run(cut: _Cut) -> object:
        def operand(node: fx.Node) -> torch.Tensor:
            axis = sampling.operands.get(node)
            return values[node] if axis is None else cut.samples_of(values[node], axis)

        args, kwargs = fx.map_arg(call.args, operand), fx.map_arg(call.kwargs, operand)
        if accumulates(call):
            if cut.start == 0 or not totals:
                like = cast(torch.Tensor, call.meta["val"])
                totals[:] = [torch.zeros(tuple(like.shape), dtype=like.dtype, device=device)]
            kwargs = {**kwargs, "total": totals[0]}
        return sampling.run(*args, **kwargs)

    return run


def _axes_ofresults_in(call: fx.Node | Call, slices: BySlices) -> Sequence[int | None]:
    """The axis along which each result has samples."""
    if slices.grid:
        return [0] * len(results_of(call))
    sampling = sampling_of(call, slices.batch)
    assert sampling is not None, f"{call.name} does not run on samples"
    return sampling.axes


def _run_tile(call: fx.Node | Call, tiling: Tiling, values: Mapping[fx.Node, torch.Tensor], cut: _Cut) -> object:
    tile = cut.tile(tiling.extents)
    needs = dict(zip(tiling.operands, tiling.needs(tile), strict=True))

    def operand(node: fx.Node) -> torch.Tensor:
        if node not in needs:
            return values[node]
        return narrowed(cut.samples_of(values[node], 0), needs[node])

    return tiling.run(*fx.map_arg(call.args, operand), tile=tile)


def _close(expected: object, found: object, eps: float) -> bool:
    """Whether two results differ by rounding only; a wrong one differs by more than half the digits of `eps`."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return expected is None and found is None
    if expected.shape != found.shape or expected.dtype is not found.dtype:
        return False
    if expected.is_complex():
        expected, found = torch.view_as_real(expected.resolve_conj()), torch.view_as_real(found.resolve_conj())
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(expected, found)
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max()
    same = (expected == found) | (expected.isnan() & found.isnan())  # infinities too
    return bool((same | ((expected - found).abs() <= math.sqrt(eps) * largest)).all())


def _together(
    whole: torch.Tensor, axis: int | None, cuts: Sequence[_Cut], device: torch.device
) -> tuple[Variant, Variant]:
    """Costs of putting slices together, in fresh memory and in memory that was used before."""
    part = cast(torch.Tensor, cuts[0].of(whole, axis)).clone()
    results: list[torch.Tensor] = []

    def copy() -> None:
        result = results[0] if results else torch.empty_like(whole)
        for cut in cuts:
            here = cast(torch.Tensor, cut.of(result, axis))
            same = here.shape == part.shape
            here.copy_(part) if same else here.zero_()
        results[:] = [result]

    fresh = timed(copy, device)
    return Variant(chunks=1, seconds=fresh, workspace_bytes=0), Variant(
        chunks=1, seconds=timed(copy, device), workspace_bytes=0
    )


def _run_into(results: list[object], run: Callable[[_Cut], object], cut: _Cut) -> None:
    results.append(run(cut))
