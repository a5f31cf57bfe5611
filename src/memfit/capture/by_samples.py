"""Which ops can run on a few samples of the batch at a time, and how they do so together.

Most ops of a network treat each sample of the batch by itself: convolutions, activations, sums, pooling, batch
normalisation once its statistics are known (`memfit.capture.again`), and the gradients of their data. Others, the
gradients of weights above all, are sums over the batch (`sums_of`). Such ops may therefore run as one, slice of the
batch by slice (`memfit.step.fusion`): `in_slices` is what the runtime calls for them.

The profiler compares slices of each op with the whole, for each shape, size of slice and alignment in memory, before a
plan relies on it: every bit, or with the lever `tile` up to rounding.

Known limits: without the lever `tile` CPU only; operands and results that have samples outside and own their memory, so
no views between ops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from memfit.capture.again import Call, normalise
from memfit.capture.batch_norm import input_gradient_from_sums, sums_of_data
from memfit.capture.by_rows import BY_ROWS, PRODUCTS, SUM, product_over_rows
from memfit.capture.resizing import gradient_of_repeated, repeat_nearest
from memfit.capture.rewrite import (
    HOLLOW_PREFIX,
    convolution_input_gradient,
    input_gradient_beside_stand_in,
    make_hollow,
)
from memfit.capture.tiles import Tile
from memfit.step.graph import SMALL_SUM_BYTES

__all__ = [
    "ELEMENT_BY_ELEMENT",
    "Slice",
    "accumulates",
    "batch_of",
    "in_slices",
    "is_alone",
    "makes_sums_or_slices",
    "nodes_of",
    "owns_memory",
    "samples_per_slice",
    "sliced_operands",
    "sliced_target",
    "sums_of",
]

_aten = torch.ops.aten

_SLICE_BYTES = 4 << 20
"""About the largest result of a slice: it fits a cache, and its work outweighs the call."""

_SLICES_OF_PRODUCT = 12
"""As many may be made where that reads a matrix more often than it should be."""

_OF_FIRST = {
    _aten.convolution.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool3d.default,
    _aten._adaptive_avg_pool2d.default,
    _aten.upsample_nearest2d.vec,
    _aten.native_layer_norm.default,
    normalise,
    repeat_nearest,
    gradient_of_repeated,
    _aten._to_copy.default,
    _aten.mm.default,
    _aten.sum.dim_IntList,
    _aten._log_softmax.default,
}
"""Calls that take samples of their first operand and all of the others."""

_OF_SEVERAL = {
    _aten.threshold_backward.default: (0, 1),
    _aten.leaky_relu_backward.default: (0, 1),
    _aten.hardtanh_backward.default: (0, 1),
    _aten.hardswish_backward.default: (0, 1),
    _aten.hardsigmoid_backward.default: (0, 1),
    _aten.gelu_backward.default: (0, 1),
    _aten.silu_backward.default: (0, 1),
    _aten.sigmoid_backward.default: (0, 1),
    _aten.tanh_backward.default: (0, 1),
    _aten.gelu.default: (0,),
    _aten.silu.default: (0,),
    _aten.sigmoid.default: (0,),
    _aten.tanh.default: (0,),
    _aten.addmm.default: (1,),
    _aten._log_softmax_backward_data.default: (0, 1),
    _aten.nll_loss_forward.default: (0, 1),
    _aten.nll_loss_backward.default: (1, 2),
    product_over_rows: (0, 1),
    _aten.convolution_backward.default: (0, 1),
    _aten.native_batch_norm_backward.default: (0, 1),
    _aten.native_layer_norm_backward.default: (0, 1, 3, 4),
    input_gradient_from_sums: (0, 1),
    sums_of_data: (0,),
    convolution_input_gradient: (0,),
    input_gradient_beside_stand_in: (0,),
    _aten.max_pool2d_with_indices_backward.default: (0, 7),
    _aten.avg_pool2d_backward.default: (0,),
    _aten._adaptive_avg_pool2d_backward.default: (0,),
}
"""Calls with the positions of the operands they take samples of; they take all of the others."""

_HOLLOW_SECOND = {
    convolution_input_gradient,
    input_gradient_beside_stand_in,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.avg_pool2d_backward.default,
    _aten._adaptive_avg_pool2d_backward.default,
}
"""Calls whose second operand gives the shape of the result and no values."""

ELEMENT_BY_ELEMENT = {
    _aten.relu.default,
    _aten.leaky_relu.default,
    _aten.hardtanh.default,
    _aten.hardswish.default,
    _aten.hardsigmoid.default,
    _aten.neg.default,
    _aten.clone.default,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
}
"""Calls that take samples of every operand that has the batch, and broadcast the others.

Only exactly rounded ones: `exp` and the like have other bits in a vector than in what is left at the end of a slice.
"""


def batch_of(call: fx.Node | Call) -> int:
    """How many samples the op has in operands and results; 0 if it does not treat samples one by one."""
    sliced, sums = sliced_operands(call), sums_of(call)
    results = [r for place, r in enumerate(_results(call)) if place not in sums and isinstance(r, torch.Tensor)]
    found = [node.meta["val"] for node in sliced] + results
    if not sliced or not all(map(_samples_outside, results)) or len({t.shape[0] for t in found}) > 1:
        return 0
    return int(found[0].shape[0])


def sums_of(call: fx.Node | Call) -> frozenset[int]:
    """Which of the results are sums over the batch."""
    if call.target in (sums_of_data, product_over_rows, _aten.sum.dim_IntList):
        return frozenset({0})
    if call.target is _aten.nll_loss_forward.default:
        return frozenset({0, 1})
    if call.target is _aten.native_layer_norm_backward.default:
        return frozenset({1, 2})
    if call.target in (_aten.convolution_backward.default, _aten.native_batch_norm_backward.default):
        return frozenset({1, 2})
    return frozenset()


def accumulates(call: fx.Node | Call) -> bool:
    """Whether the call can add to a sum while it makes it; it then takes the sum as `total`."""
    return call.target is product_over_rows


def sliced_target(call: fx.Node | Call) -> Any:
    """What is called with slices in place of the call's target."""
    return _with_hollow_slice(call.target) if call.target in _HOLLOW_SECOND else call.target


def _with_hollow_slice(target: Any) -> Callable[..., Any]:
    def run(gradient: torch.Tensor, hollow: torch.Tensor, *rest: Any) -> Any:
        like = torch.empty_strided(
            (gradient.shape[0], *hollow.shape[1:]), hollow.stride(), dtype=hollow.dtype, device="meta"
        )
        return target(gradient, make_hollow(like, gradient.device), *rest)

    run.__name__ = getattr(target, "__name__", str(target))
    return run


def sliced_operands(call: fx.Node | Call) -> frozenset[fx.Node]:
    """The operands of which the op takes samples; none if it cannot run so."""
    nodes = nodes_of(call.args)
    if call.kwargs and call.target in ELEMENT_BY_ELEMENT:
        return frozenset()  # `alpha` multiplies as well, rounded once or twice
    if call.target in _OF_FIRST:
        if not makes_sums_or_slices(call):
            return frozenset()
        sliced, whole = nodes[:1], nodes[1:]
    elif call.target in _OF_SEVERAL:
        if not makes_sums_or_slices(call):
            return frozenset()
        positions = _OF_SEVERAL[call.target]
        sliced = [n for p in positions if p < len(call.args) and isinstance(n := call.args[p], fx.Node)]
        if len(sliced) < len(positions):
            return frozenset()
        whole = nodes_of([a for p, a in enumerate(call.args) if p not in positions])
    elif call.target is _aten.cat.default and _dimension(call) != 0:
        sliced, whole = nodes, []
    elif call.target in ELEMENT_BY_ELEMENT:
        shape = call.meta["val"].shape
        if len(shape) < 2:
            return frozenset()
        sliced = [n for n in nodes if _has_batch(n, shape)]
        whole = [n for n in nodes if not _has_batch(n, shape)]
        if any(n.meta["val"].dim() == len(shape) and n.meta["val"].shape[0] != 1 for n in whole):
            return frozenset()
    else:
        return frozenset()
    # Up to rounding, rows may be those of a view of anything.
    fits = _has_samples if call.target in BY_ROWS else _samples_outside
    if set(sliced) & set(whole) or not all(fits(n.meta.get("val")) for n in sliced):
        return frozenset()
    return frozenset(sliced)


def owns_memory(node: fx.Node) -> bool:
    """Whether a result lies in memory that holds nothing else, so that another one fits there when it is gone."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and is_alone(value)


def samples_per_slice(calls: Iterable[fx.Node | Call]) -> dict[int, int]:
    """For each size of batch how many samples a slice has, the same for all ops so that they can run together.

    The larger the results of an op the fewer; but a product reads its matrix again for each slice, so slices of its
    result are no smaller than the matrix, unless they were few.
    """
    largest: dict[int, int] = {}
    matrices: dict[int, int] = {}
    for call in calls:
        batch, results = batch_of(call), _results(call)
        if call.target in PRODUCTS:
            whole = [n.meta["val"] for n in call.all_input_nodes if n not in sliced_operands(call)]
            whole += [results[place] for place in sums_of(call)]
            matrices[batch] = max(matrices.get(batch, 0), *map(_nbytes, whole))
            results = [result for place, result in enumerate(results) if place not in sums_of(call)]
        largest[batch] = max(largest.get(batch, 1), sum(_nbytes(r) for r in results if isinstance(r, torch.Tensor)))

    def samples(batch: int) -> int:
        small = max(1, _SLICE_BYTES * batch // largest[batch])
        like_matrix = -(-matrices.get(batch, 0) * batch // largest[batch])
        # Of at least two slices, since one is the whole.
        return min(max(small, min(like_matrix, -(-batch // _SLICES_OF_PRODUCT))), -(-batch // 2))

    return {batch: samples(batch) for batch in largest if batch > 1}


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """How ops that run as one are called.

    Attributes:
        run: of one slice: from operands, before these a list of tiles if there are any, to the slices of the results.
        sliced: positions of operands of which samples are taken.
        batch: samples in all.
        samples: in one slice.
        results: a tensor like each result.
        sums: positions of results that are sums over the slices.
        over: for each result the position of the operand whose memory it takes over, if any; one that is not sliced
            serves for nothing else.
        totals: positions of those sums to which slices are added while they are made; `run` takes a list of them first.
        pieces: for each piece in space of samples the tiles to run it with, and the tile of each result it makes.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    sliced: Collection[int]
    batch: int
    samples: int
    results: Sequence[torch.Tensor]
    over: Sequence[int | None]
    sums: Collection[int] = ()
    totals: Sequence[int] = ()
    pieces: Sequence[tuple[Sequence[Tile], Sequence[Tile]]] = ()


def in_slices(how: Slice) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What runs ops as one, slice after slice."""
    layouts = [(tuple(r.shape), r.stride(), r.dtype) for r in how.results]

    def fused(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=operands[0].device)
            if over is None
            # Sample for sample in the same place, whatever the shapes.
            else operands[over].new_empty(0, dtype=dtype).set_(operands[over].untyped_storage(), 0, shape, stride)
            for (shape, stride, dtype), over in zip(layouts, how.over, strict=True)
        ]
        wide = {
            place: torch.empty_like(results[place], dtype=torch.float64)
            for place in how.sums
            if place not in how.totals and _is_small(results[place])
        }
        totals = [[results[place].zero_() for place in how.totals]] if how.totals else []
        is_first = True
        for start in range(0, how.batch, how.samples):
            here = slice(start, start + how.samples)
            given = [t[here] if i in how.sliced else t for i, t in enumerate(operands)]
            for tiles, made in how.pieces or [((), ())]:
                parts = how.run(tiles, *given) if how.pieces else how.run(*totals, *given)
                for place, result in enumerate(results):
                    if place in how.totals:
                        continue
                    if place not in how.sums:
                        space = (slice(None), *(slice(*along) for along in made[place])) if how.pieces else ()
                        result[(here, *space)] = parts[place]
                    elif is_first:
                        wide.get(place, result).copy_(parts[place])
                    else:
                        wide.get(place, result).add_(parts[place])
                is_first = False
                del parts  # else the next slice is made beside them
        for place, total in wide.items():
            results[place].copy_(total)
        return tuple(results)

    return fused


def _is_small(total: torch.Tensor) -> bool:
    """Whether slices of a sum are added up in float64, which costs little and keeps digits."""
    return total.is_floating_point() and _nbytes(total) <= SMALL_SUM_BYTES


def makes_sums_or_slices(call: fx.Node | Call) -> bool:
    """Whether no result mixes samples in another way, as both gradients of one kernel would."""
    if call.target in _HOLLOW_SECOND:
        return isinstance(call.args[1], fx.Node) and str(call.args[1].target).startswith(HOLLOW_PREFIX)
    if call.target in (_aten.convolution_backward.default, _aten.native_batch_norm_backward.default):
        return not cast(Sequence[bool], call.args[-1])[0]
    if call.target in (_aten._log_softmax.default, _aten._log_softmax_backward_data.default):
        place = call.args[1 if call.target is _aten._log_softmax.default else 2]
        return bool(cast(int, place) % _first_result(call).dim())
    if call.target is _aten._to_copy.default:
        where = cast(fx.Node, call.args[0]).meta["val"].device
        return call.kwargs.keys() <= {"dtype", "layout", "device"} and call.kwargs.get("device", where) == where
    if call.target is _aten.sum.dim_IntList:
        return bool(call.args[1] == [0])
    if call.target is _aten.addmm.default:
        bias = cast(fx.Node, call.args[0]).meta["val"]
        return bool(bias.dim() < 2 or bias.shape[0] == 1)
    if call.target is _aten.nll_loss_forward.default:
        return bool(call.args[3] == SUM)
    if call.target is _aten.nll_loss_backward.default:
        return bool(call.args[4] != 0)  # else the gradient it takes is one number for each row
    return True


def _first_result(call: fx.Node | Call) -> torch.Tensor:
    return cast(torch.Tensor, _results(call)[0])


def _results(call: fx.Node | Call) -> Sequence[object]:
    results = call.meta.get("val")
    return results if isinstance(results, list | tuple) else [results]


def _has_batch(node: fx.Node, shape: Sequence[int]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == len(shape) and value.shape[0] == shape[0]


def _has_samples(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] > 1


def _samples_outside(value: object) -> bool:
    """Whether samples lie one after the other, each dense, in memory that holds nothing else."""
    return bool(
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.shape[0] > 1
        and is_alone(value)
        and value.stride(0) * value.shape[0] == value.numel()
    )


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes all of its memory."""
    nbytes = tensor.numel() * tensor.element_size()
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes)


def nodes_of(arguments: Any) -> list[fx.Node]:
    """The operands in order, those in lists too."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found


def _dimension(call: fx.Node | Call) -> int:
    dimension = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    assert isinstance(dimension, int)
    return int(dimension % call.meta["val"].dim())
