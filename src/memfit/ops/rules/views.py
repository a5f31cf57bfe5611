"""Ops that make views: they take no memory, and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.ops.op_rule import OpRule, View

__all__ = ["RULES"]

_aten = torch.ops.aten

RULES: Mapping[Any, OpRule] = {
    _aten.detach.default: OpRule(view=View.NOTHING, binding=torch.detach),
    _aten.alias.default: OpRule(view=View.NOTHING),
    _aten.view.default: OpRule(view=View.SHAPE, binding=torch.Tensor.view),
    _aten._unsafe_view.default: OpRule(view=View.SHAPE, binding=torch.Tensor.view),
    _aten.t.default: OpRule(view=View.TWO_AXES, binding=torch.t),
    _aten.transpose.int: OpRule(view=View.TWO_AXES, binding=torch.transpose),
    _aten.permute.default: OpRule(view=View.AXES, binding=torch.permute),
    _aten.expand.default: OpRule(view=View.AXES, binding=torch.Tensor.expand),
    _aten.select.int: OpRule(view=View.AXES, binding=torch.select),
    _aten.unsqueeze.default: OpRule(view=View.AXES, binding=torch.unsqueeze),
    _aten.squeeze.default: OpRule(view=View.AXES),
    _aten.squeeze.dim: OpRule(view=View.AXES),
    _aten.squeeze.dims: OpRule(view=View.AXES),
    _aten.as_strided.default: OpRule(view=View.STRIDES, binding=torch.as_strided),
}
