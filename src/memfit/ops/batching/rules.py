"""Rules of ops that can run on a few samples of the batch at a time, and of the axes along which their samples lie.

Most ops of a network treat each sample of the batch by itself: convolutions, activations, attention within a sample,
pooling, normalisation of a sample, batch normalisation once its statistics are known (`memfit.fxir.call`), and the
gradients of their data. Other ops, above all weight gradients, are sums over the batch. Ops that couple samples in
another way are not listed, ops that put anything but samples outermost in memory are recognised by the layout, and both
run whole.

A sample need not be one row: the tokens of a batch are a matrix of batch times length rows, and attention heads are
another view of the same memory. So the batch is a number, and a tensor has samples along an axis if that number divides
the size of the axis: the quotient is the number of consecutive rows that belong to one sample. Results have samples
outermost in memory; operands may be any view.

Known limits: attention only as the fused kernel on CPU, or written out as matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import nodes_of, outer_axis, results_of
from memfit.fxir.marks import METADATA_ONLY_PREFIX
from memfit.ops.kernels.batch_norm import input_gradient_from_sums, sums_of_data
from memfit.ops.kernels.convolution import (
    convolution_input_gradient,
    convolution_input_slices,
    input_gradient_beside_stand_in,
    make_metadata_only,
)
from memfit.ops.kernels.dropout import masked
from memfit.ops.kernels.group_norm import input_gradient, products_over_space, scaled_and_shifted, sums_of_space
from memfit.ops.kernels.row_products import SUM, product_over_rows
from memfit.ops.recompute import normalise

__all__ = [
    "KEEP_BITS",
    "Sampling",
    "is_pointwise",
    "makes_sums_or_slices",
    "sampling_of",
    "sums_of",
]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a call runs on samples.

    Attributes:
        operands: operands of which the call takes samples, with the axis of each.
        axes: axis of samples of each result; None for sums over the batch and for results that are not tensors.
        run: function that is called in place of the call's target.
    """

    operands: Mapping[fx.Node, int]
    axes: tuple[int | None, ...]
    run: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes that a rule finds, of operands and of results that are not sums; the function to call if not the target."""

    operands: Mapping[fx.Node, int]
    of_results: int
    run: Callable[..., Any] | None = field(default=None)


def sampling_of(call: fx.Node | Call, batch: int) -> Sampling | None:
    """How a call runs on samples of a batch; None if it cannot."""
    rule = _RULES.get(call.target) or (_pointwise if is_pointwise(call) else None)
    found = rule(call, batch) if rule is not None and batch > 1 else None
    if found is None or not found.operands:
        return None
    sums, results = sums_of(call), results_of(call)
    axes = tuple(
        found.of_results if isinstance(result, torch.Tensor) and place not in sums else None
        for place, result in enumerate(results)
    )
    outside = all(axis is None or outer_axis(result, batch) == axis for axis, result in zip(axes, results, strict=True))
    divides = all(
        axis < node.meta["val"].dim() and node.meta["val"].shape[axis] % batch == 0
        for node, axis in found.operands.items()
    )
    return (
        Sampling(operands=found.operands, axes=axes, run=found.run or cast(Any, call.target))
        if outside and divides
        else None
    )


def sums_of(call: fx.Node | Call) -> frozenset[int]:
    """Positions of the results that are sums over the batch."""
    if call.target is _aten.sum.dim_IntList:
        return frozenset() if _axis_kept(call) is not None else frozenset({0})
    return _SUMS.get(call.target, frozenset())


def is_pointwise(call: fx.Node | Call) -> bool:
    """Whether each element of the result depends only on the elements of the broadcast operands at its position."""
    return call.target in _POINTWISE or torch.Tag.pointwise in getattr(call.target, "tags", ())


def makes_sums_or_slices(call: fx.Node | Call) -> bool:
    """Whether results mix samples only in sums over the batch; a kernel for both gradients mixes them otherwise."""
    if call.target in _METADATA_ONLY_SECOND:
        return isinstance(call.args[1], fx.Node) and str(call.args[1].target).startswith(METADATA_ONLY_PREFIX)
    if call.target in (_aten.convolution_backward.default, _aten.native_batch_norm_backward.default):
        return not cast(Sequence[bool], call.args[-1])[0]
    if call.target is _aten.addmm.default:
        bias = cast(fx.Node, call.args[0]).meta["val"]
        return bool(bias.dim() < 2 or bias.shape[0] == 1)
    if call.target is _aten.nll_loss_forward.default:
        return bool(call.args[3] == SUM)
    if call.target is _aten.nll_loss_backward.default:
        return bool(call.args[4] != 0)  # otherwise its gradient operand has one number per row
    return True


_METADATA_ONLY_SECOND = {
    convolution_input_gradient,
    convolution_input_slices,
    input_gradient_beside_stand_in,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.avg_pool2d_backward.default,
    _aten._adaptive_avg_pool2d_backward.default,
}
"""Calls whose second operand gives the shape of the result and no values."""

_SUMS: dict[Any, frozenset[int]] = {
    sums_of_data: frozenset({0}),
    sums_of_space: frozenset({0}),
    products_over_space: frozenset({0}),
    product_over_rows: frozenset({0}),
    _aten.nll_loss_forward.default: frozenset({0, 1}),
    _aten.native_layer_norm_backward.default: frozenset({1, 2}),
    _aten.native_group_norm_backward.default: frozenset({1, 2}),
    _aten._fused_rms_norm_backward.default: frozenset({1}),
    _aten.convolution_backward.default: frozenset({1, 2}),
    _aten.native_batch_norm_backward.default: frozenset({1, 2}),
}


def _rows(*positions: int) -> Callable[[fx.Node | Call, int], _Axes | None]:
    """The rule of calls that take samples along the first axis of operands at `positions`, and other operands whole."""

    def rule(call: fx.Node | Call, batch: int) -> _Axes | None:
        sliced = _at(call, positions)
        if sliced is None or not makes_sums_or_slices(call):
            return None
        run = _with_metadata_only_slice(call.target) if call.target in _METADATA_ONLY_SECOND else None
        return _Axes(dict.fromkeys(sliced, 0), 0, run)

    return rule


def _pointwise(call: fx.Node | Call, batch: int) -> _Axes | None:
    result = _first_result(call)
    axis = outer_axis(result, batch)
    if axis is None or result.dim() < 2:
        return None
    operands: dict[fx.Node, int] = {}
    for node in nodes_of((call.args, call.kwargs)):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        theirs = axis - (result.dim() - value.dim())
        if theirs >= 0 and value.shape[theirs] == result.shape[axis]:
            operands[node] = theirs
    return _Axes(operands, axis)


def _copy(call: fx.Node | Call, batch: int) -> _Axes | None:
    where = cast(fx.Node, call.args[0]).meta["val"].device
    same = call.kwargs.keys() <= {"dtype", "layout", "device"} and call.kwargs.get("device", where) == where
    return _pointwise(call, batch) if same else None


def _not_along(place: int, *positions: int) -> Callable[[fx.Node | Call, int], _Axes | None]:
    """The rule of calls that work along one axis, argument number `place`, which must not be the axis of samples."""

    def rule(call: fx.Node | Call, batch: int) -> _Axes | None:
        sliced, axis = _at(call, positions), outer_axis(_first_result(call), batch)
        along = cast(int, _argument(call, place, "dim", 0))
        if sliced is None or axis is None or along % _first_result(call).dim() == axis:
            return None
        return _Axes(dict.fromkeys(sliced, axis), axis)

    return rule


def _concatenation(call: fx.Node | Call, batch: int) -> _Axes | None:
    axis = outer_axis(_first_result(call), batch)
    along = cast(int, _argument(call, 1, "dim", 0)) % _first_result(call).dim()
    return None if axis is None or along == axis else _Axes(dict.fromkeys(nodes_of(call.args[0]), axis), axis)


def _normalised(*positions: int) -> Callable[[fx.Node | Call, int], _Axes | None]:
    """The rule of normalisations over the last axes, and of their gradients."""

    def rule(call: fx.Node | Call, batch: int) -> _Axes | None:
        sliced, axis = _at(call, positions), outer_axis(_first_result(call), batch)
        shapes = [a for a in call.args if isinstance(a, list | tuple) and a and all(type(n) is int for n in a)]
        if sliced is None or axis is None or not shapes or axis >= _first_result(call).dim() - len(shapes[0]):
            return None
        return _Axes(dict.fromkeys(sliced, axis), axis)

    return rule


def _group_norm(call: fx.Node | Call, batch: int) -> _Axes | None:
    is_backward = call.target is _aten.native_group_norm_backward.default
    sliced = _at(call, (0, 1, 2, 3) if is_backward else (0,))
    place, target = 5 if is_backward else 3, cast(Any, call.target)
    result = _first_result(call)
    if sliced is None or not isinstance(result, torch.Tensor) or call.args[place] != result.shape[0]:
        return None

    def run(data: torch.Tensor, *rest: Any) -> Any:
        return target(data, *rest[: place - 1], data.shape[0], *rest[place:])

    return _Axes(dict.fromkeys(sliced, 0), 0, run)


def _reduction(call: fx.Node | Call, batch: int) -> _Axes | None:
    """Axes of samples in a reduction over other axes, or in a sum over the axis of samples."""
    data = cast(fx.Node, call.args[0])
    kept = _axis_kept(call)
    if kept is not None:
        return _Axes({data: kept[0]}, kept[1])
    value = data.meta["val"]
    along = [axis for axis in _reduced(call) if value.shape[axis] % batch == 0]
    if call.target is not _aten.sum.dim_IntList or not along:
        return None
    return _Axes({data: max(along, key=lambda axis: value.stride(axis))}, 0)


def _reduced(call: fx.Node | Call) -> list[int]:
    dims = cast(fx.Node, call.args[0]).meta["val"].dim()
    given = (_argument(call, 1, "dim", None) or range(dims)) if dims else []
    return [axis % dims for axis in ([given] if isinstance(given, int) else cast(Sequence[int], given))]


def _axis_kept(call: fx.Node | Call) -> tuple[int, int] | None:
    """The outermost axis of a reduction's operand and its position in the result; None if that axis is reduced too."""
    value = cast(fx.Node, call.args[0]).meta["val"]
    reduced = set(_reduced(call))
    outer = next((a for a in sorted(range(value.dim()), key=lambda a: -value.stride(a)) if value.shape[a] > 1), None)
    if outer is None or outer in reduced:
        return None
    keeps = bool(_argument(call, 2, "keepdim", False))
    return outer, outer if keeps else outer - sum(axis < outer for axis in reduced)


def _embedding(call: fx.Node | Call, batch: int) -> _Axes | None:
    axis, places = outer_axis(_first_result(call), batch), cast(fx.Node, call.args[1])
    return None if axis is None or axis >= places.meta["val"].dim() else _Axes({places: axis}, axis)


def _biased_product(call: fx.Node | Call, batch: int) -> _Axes | None:
    """The rule of a batch of products added to an operand that may be the same for all products."""
    added, *factors = (cast(fx.Node, a) for a in call.args[:3])
    value, result = added.meta["val"], _first_result(call)
    if added in factors or factors[0] is factors[1]:
        return None
    operands = dict.fromkeys(factors, 0)
    if value.dim() == result.dim() and value.shape[0] == result.shape[0]:
        operands[added] = 0
    return _Axes(operands, 0)


def _attention(*positions: int) -> Callable[[fx.Node | Call, int], _Axes | None]:
    def rule(call: fx.Node | Call, batch: int) -> _Axes | None:
        sliced, mask = _at(call, positions), call.kwargs.get("attn_mask")
        if sliced is None:
            return None
        operands = dict.fromkeys(sliced, 0)
        samples = _first_result(call).shape[0]
        if isinstance(mask, fx.Node) and mask.meta["val"].dim() == 4 and mask.meta["val"].shape[0] == samples:
            operands[mask] = 0
        return _Axes(operands, 0)

    return rule


def _padded_back(call: fx.Node | Call, batch: int) -> _Axes | None:
    """The rule of the gradient of a slice or of one element along an axis: zeros around it, in a given shape."""
    gradient, sizes, along, *_ = cast(tuple[Any, ...], call.args)
    axis, target = outer_axis(_first_result(call), batch), cast(Any, call.target)
    if axis is None or along % len(sizes) == axis:
        return None
    theirs = axis - (along % len(sizes) < axis and gradient.meta["val"].dim() < len(sizes))

    def run(gradient: torch.Tensor, sizes: Sequence[int], *rest: Any) -> Any:
        here = list(sizes)
        here[axis] = gradient.shape[theirs]
        return target(gradient, here, *rest)

    return _Axes({gradient: theirs}, axis, run)


def _resized_back(call: fx.Node | Call, batch: int) -> _Axes | None:
    gradient, target = cast(fx.Node, call.args[0]), cast(Any, call.target)

    def run(gradient: torch.Tensor, sizes: Any, shape: Sequence[int], *rest: Any) -> Any:
        return target(gradient, sizes, [gradient.shape[0], *shape[1:]], *rest)

    return _Axes({gradient: 0}, 0, run)


def _at(call: fx.Node | Call, positions: Sequence[int]) -> list[fx.Node] | None:
    """The operands at `positions`; None unless all are tensors and no other argument is one of them."""
    found = [call.args[p] for p in positions if p < len(call.args)]
    nodes = [node for node in found if isinstance(node, fx.Node)]
    others = nodes_of([a for p, a in enumerate(call.args) if p not in positions])
    return nodes if len(nodes) == len(positions) and not set(nodes) & set(others) else None


def _argument(call: fx.Node | Call, position: int, name: str, default: object) -> object:
    return call.args[position] if position < len(call.args) else call.kwargs.get(name, default)


def _first_result(call: fx.Node | Call) -> torch.Tensor:
    return cast(torch.Tensor, results_of(call)[0])


def _with_metadata_only_slice(target: Any) -> Callable[..., Any]:
    def run(gradient: torch.Tensor, metadata_only: torch.Tensor, *rest: Any) -> Any:
        like = torch.empty_strided(
            (gradient.shape[0], *metadata_only.shape[1:]),
            metadata_only.stride(),
            dtype=metadata_only.dtype,
            device="meta",
        )
        return target(gradient, make_metadata_only(like, gradient.device), *rest)

    run.__name__ = getattr(target, "__name__", str(target))
    return run


_WINDOWED = (
    _aten.convolution.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool3d.default,
    _aten._adaptive_avg_pool2d.default,
)
"""Ops that make each element from a window of their operand."""

_RESIZING = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")

_POINTWISE = {
    masked,
    _aten.leaky_relu_backward.default,
    _aten.hardtanh_backward.default,
    _aten.hardswish_backward.default,
    _aten.hardsigmoid_backward.default,
    _aten.elu_backward.default,
    _aten.mish_backward.default,
    _aten.softplus_backward.default,
}
"""Pointwise ops that torch does not tag as pointwise."""

_RULES: dict[Any, Callable[[fx.Node | Call, int], _Axes | None]] = {
    **dict.fromkeys(
        (
            *_WINDOWED,
            normalise,
            sums_of_data,
            _aten.mm.default,
            convolution_input_gradient,
            convolution_input_slices,
            input_gradient_beside_stand_in,
            _aten.avg_pool2d_backward.default,
            _aten._adaptive_avg_pool2d_backward.default,
        ),
        _rows(0),
    ),
    **dict.fromkeys(
        (
            _aten.nll_loss_forward.default,
            product_over_rows,
            _aten.bmm.default,
            _aten.convolution_backward.default,
            _aten.native_batch_norm_backward.default,
            input_gradient_from_sums,
            sums_of_space,
        ),
        _rows(0, 1),
    ),
    **dict.fromkeys((scaled_and_shifted, products_over_space), _rows(0, 1, 2)),
    input_gradient: _rows(0, 1, 2, 3, 4),
    _aten.addmm.default: _rows(1),
    _aten.baddbmm.default: _biased_product,
    _aten.nll_loss_backward.default: _rows(1, 2),
    _aten.max_pool2d_with_indices_backward.default: _rows(0, 7),
    _aten._to_copy.default: _copy,
    _aten._softmax.default: _not_along(1, 0),
    _aten._safe_softmax.default: _not_along(1, 0),
    _aten._log_softmax.default: _not_along(1, 0),
    _aten._softmax_backward_data.default: _not_along(2, 0, 1),
    _aten._log_softmax_backward_data.default: _not_along(2, 0, 1),
    _aten.cumsum.default: _not_along(1, 0),
    _aten.cat.default: _concatenation,
    _aten.native_layer_norm.default: _normalised(0),
    _aten.native_layer_norm_backward.default: _normalised(0, 1, 3, 4),
    _aten._fused_rms_norm.default: _normalised(0),
    _aten._fused_rms_norm_backward.default: _normalised(0, 1, 3),
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm,
    _aten.embedding.default: _embedding,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(0, 1, 2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(0, 1, 2, 3, 4, 5),
    _aten.slice_backward.default: _padded_back,
    _aten.select_backward.default: _padded_back,
    **{getattr(_aten, f"upsample_{way}").default: _rows(0) for way in _RESIZING},
    **{getattr(_aten, f"upsample_{way}_backward").default: _resized_back for way in _RESIZING},
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default), _reduction),
}

KEEP_BITS = {
    *_WINDOWED,
    _aten.upsample_nearest2d.default,
    _aten.native_layer_norm.default,
    _aten.cat.default,
    normalise,
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
"""Forward calls whose slices may have the bits of the whole; the profiler finds whether they do.

Pointwise ops are listed only if they round once: for some elements, `exp` and similar ops give other bits in a vector
than in the remainder at the end of a slice, and a comparison of some slices may miss these elements.
"""
