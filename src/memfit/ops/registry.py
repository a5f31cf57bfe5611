"""The rule of each op (`memfit.ops.op_rule`), found by the op or by its name in a step graph.

To add an op, add its rule to the file of its family in `memfit.ops.rules`; nothing else lists ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.op_rule import OpRule
from memfit.ops.rules import (
    attention,
    batch_norm,
    convolution,
    embedding,
    factories,
    group_norm,
    layer_norm,
    linalg,
    losses,
    pointwise,
    pooling,
    products,
    reductions,
    resizing,
    shapes,
    views,
)

__all__ = ["REGISTERED", "is_pointwise", "rule_named", "rule_of", "sums_of"]

_FAMILIES = (
    *(attention, batch_norm, convolution, embedding, group_norm, layer_norm, linalg, losses, pointwise, pooling),
    *(products, reductions, resizing, shapes, factories, views),
)

REGISTERED: Mapping[Any, OpRule] = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}
"""The rules that are written down, by op."""

_NO_RULE = OpRule()
_BY_NAME = {str(op): rule for op, rule in REGISTERED.items()}


def rule_of(op: Any) -> OpRule:
    """The rule of an op; ops that torch tags as pointwise have that of pointwise ops, unknown ones an empty one."""
    rule = REGISTERED.get(op)
    if rule is not None:
        return rule
    return pointwise.POINTWISE if torch.Tag.pointwise in getattr(op, "tags", ()) else _NO_RULE


def rule_named(name: str) -> OpRule:
    """The written rule of an op by its name in a step graph (`Op.target`); an empty one if there is none."""
    return _BY_NAME.get(name, _NO_RULE)


def is_pointwise(call: fx.Node | Call) -> bool:
    """Whether each element of the result depends only on the elements of the broadcast operands at its position."""
    return rule_of(call.target).is_pointwise


def sums_of(call: fx.Node | Call) -> frozenset[int]:
    """Positions of the results that are sums over the batch."""
    rule = rule_of(call.target)
    return rule.sums if rule.sums_if is None or rule.sums_if(call) else frozenset()
