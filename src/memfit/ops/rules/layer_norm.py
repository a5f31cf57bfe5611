"""Layer and RMS normalisation, over the last axes of each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import outer_axis
from memfit.ops.batching.axes import first_result, operands_at
from memfit.ops.op_rule import Axes, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten


def _normalised(*positions: int) -> Callable[[fx.Node | Call, int], Axes | None]:
    """The rule of normalisations over the last axes, and of their gradients."""

    def rule(call: fx.Node | Call, batch: int) -> Axes | None:
        sliced, axis = operands_at(call, positions), outer_axis(first_result(call), batch)
        shapes = [a for a in call.args if isinstance(a, list | tuple) and a and all(type(n) is int for n in a)]
        if sliced is None or axis is None or not shapes or axis >= first_result(call).dim() - len(shapes[0]):
            return None
        return Axes(dict.fromkeys(sliced, axis), axis)

    return rule


RULES = {
    _aten.native_layer_norm.default: OpRule(
        batch=_normalised(0), slices_keep_bits=True, binding=torch.native_layer_norm
    ),
    _aten.native_layer_norm_backward.default: OpRule(batch=_normalised(0, 1, 3, 4), sums=frozenset({1, 2})),
    _aten._fused_rms_norm.default: OpRule(batch=_normalised(0)),
    _aten._fused_rms_norm_backward.default: OpRule(batch=_normalised(0, 1, 3), sums=frozenset({1})),
}
