"""Pointwise ops, and the calls that write their result over an operand.

torch tags most pointwise ops; `memfit.ops.registry` gives those that are not listed here `POINTWISE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfit.ops.batching.axes import same_position
from memfit.ops.kernels.dropout import masked, masked_over_data
from memfit.ops.op_rule import OpRule
from memfit.ops.tiling.same_tile import elementwise

__all__ = ["POINTWISE", "RULES"]

_aten = torch.ops.aten

POINTWISE = OpRule(batch=same_position, tile=elementwise, is_pointwise=True)


def _add_over_second(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return second.add_(first)


def _mul_over_second(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return second.mul_(first)


def _gradient_into(target: Any) -> dict[int, Callable[..., Any]]:
    """In-place forms of a pointwise backward op: over the gradient that it takes, and over the other operand."""

    def over_gradient(gradient: torch.Tensor, other: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        return target(gradient, other, *rest, **kwargs, grad_input=gradient)

    def over_other(gradient: torch.Tensor, other: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        return target(gradient, other, *rest, **kwargs, grad_input=other)

    for run in (over_gradient, over_other):
        run.__name__ = run.__qualname__ = f"{target._opname}_{run.__name__}"
    return {0: over_gradient, 1: over_other}


def _first_or_plain(node: fx.Node, position: int) -> bool:
    return position == 0 or (not node.kwargs and len(node.args) == 2)


def _over(
    *,
    first: Any,
    second: Any = None,
    keep_bits: bool = False,
    pointwise: OpRule = POINTWISE,
    binding: Callable[..., Any] | None = None,
) -> OpRule:
    """The rule of a pointwise op that writes over its first operand, or also over its `second` one."""
    in_place = {0: first} if second is None else {0: first, 1: second}
    return replace(
        pointwise, slices_keep_bits=keep_bits, in_place=in_place, in_place_if=_first_or_plain, binding=binding
    )


def _gradient(op: Any) -> OpRule:
    return replace(POINTWISE, in_place=_gradient_into(op.grad_input), slices_keep_bits=op in _SELECTING)


_TAGGED_BY_MEMFIT = (
    _aten.hardswish_backward.default,
    _aten.elu_backward.default,
    _aten.mish_backward.default,
    _aten.softplus_backward.default,
)
"""Pointwise ops that torch does not tag as pointwise."""

_GRADIENTS = (
    *(_aten.threshold_backward, _aten.gelu_backward, _aten.silu_backward, _aten.tanh_backward, _aten.sigmoid_backward),
    *(_aten.hardtanh_backward, _aten.hardsigmoid_backward),
)
"""Gradients that can be written over either operand."""

_SELECTING = (_aten.threshold_backward, _aten.hardtanh_backward)
"""Gradients that pass each number on or leave it out."""

_ONLY_BOUND: Mapping[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: torch.native_dropout,
    _aten.relu_.default: torch.relu_,
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.mul_.Tensor: torch.Tensor.mul_,
}
"""Bindings of ops that run whole and in memory of their own, or write over their first operand."""

RULES: Mapping[Any, OpRule] = {
    **dict.fromkeys(_TAGGED_BY_MEMFIT, POINTWISE),
    **{op.default: _gradient(op) for op in _GRADIENTS},
    **{op: OpRule(binding=binding) for op, binding in _ONLY_BOUND.items()},
    _aten.leaky_relu_backward.default: replace(POINTWISE, slices_keep_bits=True),
    _aten.where.self: replace(POINTWISE, slices_keep_bits=True, binding=torch.where),
    _aten.relu.default: _over(first=_aten.relu_.default, keep_bits=True, binding=torch.relu),
    _aten.leaky_relu.default: replace(POINTWISE, slices_keep_bits=True),
    _aten.hardtanh.default: _over(first=_aten.hardtanh_.default, keep_bits=True),
    _aten.hardsigmoid.default: _over(first=_aten.hardsigmoid_.default, keep_bits=True),
    _aten.hardswish.default: _over(first=_aten.hardswish_.default, keep_bits=True, pointwise=OpRule()),
    _aten.silu.default: _over(first=_aten.silu_.default),
    _aten.sigmoid.default: _over(first=_aten.sigmoid_.default, binding=torch.sigmoid),
    _aten.tanh.default: _over(first=_aten.tanh_.default, binding=torch.tanh),
    _aten.gelu.default: _over(first=_aten.gelu_.default),
    _aten.neg.default: _over(first=_aten.neg_.default, keep_bits=True),
    _aten.clone.default: replace(POINTWISE, slices_keep_bits=True),
    _aten.add.Tensor: _over(first=_aten.add_.Tensor, second=_add_over_second, keep_bits=True, binding=torch.add),
    _aten.sub.Tensor: _over(first=_aten.sub_.Tensor, keep_bits=True, binding=torch.sub),
    _aten.mul.Tensor: _over(first=_aten.mul_.Tensor, second=_mul_over_second, keep_bits=True, binding=torch.mul),
    _aten.div.Tensor: _over(first=_aten.div_.Tensor, keep_bits=True, binding=torch.div),
    _aten.div.Scalar: _over(first=_aten.div_.Scalar),
    _aten.mul.Scalar: _over(first=_aten.mul_.Tensor),  # `mul_.Scalar` rounds the number to half precision first
    _aten.masked_fill.Scalar: _over(first=_aten.masked_fill_.Scalar),
    masked: replace(POINTWISE, in_place={0: masked_over_data}),
}
