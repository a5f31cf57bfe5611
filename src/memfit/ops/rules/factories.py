"""Ops that make a tensor like another one, of which they read only shape, layout, dtype and device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.ops.op_rule import OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten

RULES: Mapping[Any, OpRule] = dict.fromkeys(
    (
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.empty_like.default),
        *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.new_empty.default),
        *(_aten.rand_like.default, _aten.randn_like.default),
    ),
    OpRule(reads_values=False),
)
