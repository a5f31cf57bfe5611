"""Softmax, cumulative sums and reductions: they work along some axes, and samples lie along others.

A sum over the axis of samples is a sum over the slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import argument, not_along
from memfit.ops.op_rule import Axes, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten


def _reduction(call: fx.Node | Call, batch: int) -> Axes | None:
    """Axes of samples in a reduction over other axes, or in a sum over the axis of samples."""
    data = cast(fx.Node, call.args[0])
    kept = _axis_kept(call)
    if kept is not None:
        return Axes({data: kept[0]}, kept[1])
    value = data.meta["val"]
    along = [axis for axis in _reduced(call) if value.shape[axis] % batch == 0]
    if call.target is not _aten.sum.dim_IntList or not along:
        return None
    return Axes({data: max(along, key=lambda axis: value.stride(axis))}, 0)


def _reduced(call: fx.Node | Call) -> list[int]:
    dims = cast(fx.Node, call.args[0]).meta["val"].dim()
    given = (argument(call, 1, "dim", None) or range(dims)) if dims else []
    return [axis % dims for axis in ([given] if isinstance(given, int) else cast(Sequence[int], given))]


def _axis_kept(call: fx.Node | Call) -> tuple[int, int] | None:
    """The outermost axis of a reduction's operand and its position in the result; None if that axis is reduced too."""
    value = cast(fx.Node, call.args[0]).meta["val"]
    reduced = set(_reduced(call))
    outer = next((a for a in sorted(range(value.dim()), key=lambda a: -value.stride(a)) if value.shape[a] > 1), None)
    if outer is None or outer in reduced:
        return None
    keeps = bool(argument(call, 2, "keepdim", False))
    return outer, outer if keeps else outer - sum(axis < outer for axis in reduced)


def _reduces_samples(call: fx.Node | Call) -> bool:
    return _axis_kept(call) is None


RULES = {
    **dict.fromkeys(
        (_aten._softmax.default, _aten._safe_softmax.default, _aten._log_softmax.default, _aten.cumsum.default),
        OpRule(batch=not_along(1, 0)),
    ),
    **dict.fromkeys(
        (_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default),
        OpRule(batch=not_along(2, 0, 1)),
    ),
    **dict.fromkeys((_aten.amax.default, _aten.amin.default), OpRule(batch=_reduction)),
    _aten.mean.dim: OpRule(batch=_reduction, binding=torch.mean),
    _aten.sum.dim_IntList: OpRule(batch=_reduction, sums=frozenset({0}), sums_if=_reduces_samples, binding=torch.sum),
}
