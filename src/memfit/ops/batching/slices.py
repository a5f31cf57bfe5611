"""Runs a fused region, a few samples of the batch at a time (`memfit.ir.fusion`, `memfit.ops.batching.axes`).

Before a plan relies on slices, the profiler compares the slices of each op with the whole op, for each shape, size of
slice and alignment in memory: bit by bit, or with the lever `tile` up to rounding.

A result that is passed on in slices never exists whole. The next op may read the result through a view, such as heads
of attention: samples are outermost in memory, so the view of a slice has the same offsets within the slice.

Known limits: without the lever `tile` CPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import outer_axis, results_of
from memfit.ir.slicing import SMALL_SUM_BYTES
from memfit.ops.batching.sampling import sampling_of
from memfit.ops.kernels.row_products import product_over_rows
from memfit.ops.registry import rule_of, sums_of
from memfit.ops.tiling.window import Tile, narrowed

__all__ = [
    "Slice",
    "SliceStream",
    "ViewOfSlice",
    "accumulates",
    "in_slices",
    "samples_between",
    "samples_per_slice",
    "view_of_samples",
]

_SLICE_BYTES = 4 << 20
"""Approximate size of the largest result of a slice: it fits a cache, and its work outweighs the cost of the call."""

_SLICES_OF_PRODUCT = 12
"""Up to this many slices are made even where their results are smaller than the matrix that each slice reads again."""


def accumulates(call: fx.Node | Call) -> bool:
    """Whether the call can add its result directly to a sum; it then takes the sum as `total`."""
    return call.target is product_over_rows


def samples_per_slice(batches: Mapping[fx.Node | Call, int]) -> dict[int, int]:
    """The number of samples per slice for each batch size, the same for all ops so that they can run together.

    The larger the results of an op, the fewer samples per slice. A product, however, reads its matrix again for each
    slice, so slices of its result are no smaller than the matrix, unless there would be few slices.

    Args:
        batches: batch size of each call.
    """
    largest: dict[int, int] = {}
    matrices: dict[int, int] = {}
    for call, batch in batches.items():
        results, sums = results_of(call), sums_of(call)
        if rule_of(call.target).reads_matrix:
            sampling = sampling_of(call, batch)
            sliced = () if sampling is None else sampling.operands
            whole = [n.meta["val"] for n in call.all_input_nodes if n not in sliced]
            whole += [results[place] for place in sums]
            matrices[batch] = max(matrices.get(batch, 0), *map(_nbytes, whole))
            results = [result for place, result in enumerate(results) if place not in sums]
        largest[batch] = max(largest.get(batch, 1), sum(_nbytes(r) for r in results if isinstance(r, torch.Tensor)))

    def samples(batch: int) -> int:
        small = max(1, _SLICE_BYTES * batch // largest[batch])
        like_matrix = -(-matrices.get(batch, 0) * batch // largest[batch])
        # There are at least two slices, since one slice is the whole.
        return min(max(small, min(like_matrix, -(-batch // _SLICES_OF_PRODUCT))), -(-batch // 2))

    return {batch: samples(batch) for batch in largest if batch > 1}


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOfSlice:
    """A view of a result from which samples are taken.

    Attributes:
        made: strides of the result.
        made_axis: axis along which the result has samples.
        rows: number of rows along that axis that belong to one sample.
        shape: shape of the view.
        stride: strides of the view.
        offset: offset at which the view starts.
        axis: axis along which the view has samples.
    """

    made: tuple[int, ...]
    made_axis: int
    rows: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    axis: int

    @staticmethod
    def of(base: torch.Tensor, value: torch.Tensor, batch: int, axis: int) -> ViewOfSlice | None:
        """The view `value` of `base` with samples along an axis; None if it has no samples there or mixes samples."""
        made_axis = outer_axis(base, batch)
        is_lazy = value.is_conj() or value.is_neg() or base.is_conj() or base.is_neg()
        if made_axis is None or base.dtype is not value.dtype or value.shape[axis] % batch or is_lazy:
            return None
        sample = base.numel() // batch
        rows = value.shape[axis] // batch
        if value.stride(axis) * rows != sample:
            return None
        reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        reach -= (value.shape[axis] - rows) * value.stride(axis)
        if value.storage_offset() + reach >= sample:
            return None
        return ViewOfSlice(
            made=base.stride(),
            made_axis=made_axis,
            rows=base.shape[made_axis] // batch,
            shape=tuple(value.shape),
            stride=value.stride(),
            offset=int(value.storage_offset()),
            axis=axis,
        )


def view_of_samples(view: ViewOfSlice, batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a function that returns the view of a slice of a result.

    Args:
        view: the view.
        batch: number of samples in the batch.
    """

    def viewed(part: torch.Tensor) -> torch.Tensor:
        count = part.shape[view.made_axis] // view.rows
        same = all(n == 1 or one == other for n, one, other in zip(part.shape, part.stride(), view.made, strict=True))
        if not same:  # the kernel lays out a few samples differently from many
            part = torch.empty_strided(part.shape, view.made, dtype=part.dtype, device=part.device).copy_(part)
        shape = list(view.shape)
        shape[view.axis] = shape[view.axis] // batch * count
        return part.as_strided(shape, view.stride, part.storage_offset() + view.offset)

    return viewed


class SliceStream(Protocol):
    """A tier-resident tensor: its slices are swapped in and swapped out in order."""

    def take(self, number: int) -> torch.Tensor:
        """Returns slice `number`, swapped in."""

    def room(self, number: int) -> torch.Tensor:
        """Returns memory for slice `number`, to be filled."""

    def send(self) -> None:
        """Starts to swap out the slice in the memory that `room` returned last."""

    def close(self) -> None:
        """Waits until all slices are swapped out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """How fused ops are called.

    Attributes:
        run: function that runs one slice: it takes the operands, preceded by a list of tiles if there are any, and
            returns the slices of the results.
        sliced: positions of operands from which samples are taken, with the axis of each.
        batch: number of samples in the batch.
        samples: number of samples in one slice.
        results: for each result, a tensor with its metadata.
        axes: axis along which each result has samples; not used for sums.
        sums: positions of results that are sums over the slices.
        over: for each result the position of the operand whose memory the result takes over, if any; such an operand
            that is not sliced serves no other purpose.
        totals: positions of sums to which ops add slices directly; `run` takes a list of these sums first.
        tile_runs: for each tile of the samples, the tiles that `run` takes, and the tile of each result that it makes.
        streams: positions of operands that are streams of slices.
        into: for results that are swapped out slice by slice, the position of the operand that is their stream; the
            call does not return these results.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    sliced: Mapping[int, int]
    batch: int
    samples: int
    results: Sequence[torch.Tensor]
    axes: Sequence[int]
    over: Sequence[int | None]
    sums: Collection[int] = ()
    totals: Sequence[int] = ()
    tile_runs: Sequence[tuple[Sequence[Tile], Sequence[Tile]]] = ()
    streams: Collection[int] = ()
    into: Mapping[int, int] = field(default_factory=dict)


def in_slices(how: Slice) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Makes a function that runs ops as one fused region, slice after slice."""
    layouts = [(tuple(r.shape), r.stride(), r.dtype, r.device) for r in how.results]

    def memory(place: int, operands: Sequence[Any]) -> torch.Tensor:
        shape, stride, dtype, device = layouts[place]
        over = how.over[place]
        if over is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        # Each sample takes the place of the same sample of the operand, whatever the shapes.
        taken: torch.Tensor = operands[over]
        return taken.new_empty(0, dtype=dtype).set_(taken.untyped_storage(), 0, shape, stride)

    def fused(*operands: Any) -> tuple[torch.Tensor, ...]:
        leaving: dict[int, SliceStream] = {place: operands[position] for place, position in how.into.items()}
        results = {place: memory(place, operands) for place in range(len(layouts)) if place not in leaving}
        wide = {
            place: torch.empty_like(results[place], dtype=torch.float64)
            for place in how.sums
            if place not in how.totals and _is_small(results[place])
        }
        totals = [[results[place].zero_() for place in how.totals]] if how.totals else []
        is_first = True
        for number, start in enumerate(range(0, how.batch, how.samples)):
            stop = min(start + how.samples, how.batch)
            given = list(operands)
            for position in how.streams:
                given[position] = operands[position].take(number)
            for position, axis in how.sliced.items():
                given[position] = samples_between(operands[position], axis, how.batch, start, stop)
            there = {
                place: leaving[place].room(number)
                if place in leaving
                else samples_between(results[place], how.axes[place], how.batch, start, stop)
                for place in range(len(layouts))
                if place not in how.sums
            }
            for tiles, made in how.tile_runs or [((), ())]:
                parts = how.run(tiles, *given) if how.tile_runs else how.run(*totals, *given)
                for place in there:
                    (narrowed(there[place], made[place]) if how.tile_runs else there[place]).copy_(parts[place])
                for place in how.sums:
                    if place in how.totals:
                        continue
                    if is_first:
                        wide.get(place, results[place]).copy_(parts[place])
                    else:
                        wide.get(place, results[place]).add_(parts[place])
                is_first = False
                del parts  # otherwise the next slice is made while they are alive
            del given, there
            for stream in leaving.values():
                stream.send()
        for stream in leaving.values():
            stream.close()
        for place, total in wide.items():
            results[place].copy_(total)
        return tuple(results.values())

    return fused


def samples_between(tensor: torch.Tensor, axis: int, batch: int, start: int, stop: int) -> torch.Tensor:
    """Samples `start` to before `stop` of a batch, as a view; each sample may have several rows along the axis."""
    rows = tensor.shape[axis] // batch
    return tensor.narrow(axis, start * rows, (stop - start) * rows)


def _is_small(total: torch.Tensor) -> bool:
    """Whether slices of a sum are added up in float64, which costs little and keeps precision."""
    return total.is_floating_point() and _nbytes(total) <= SMALL_SUM_BYTES
