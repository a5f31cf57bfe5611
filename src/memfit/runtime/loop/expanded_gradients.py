"""Gradients that arrive with repeated numbers, such as that of `output.sum() / n`, which is one number expanded.

AOTAutograd copies such a gradient to memory of its own, in the layout that the backward graph was traced with. A sum
over a repeated number may round otherwise than a sum over copies of it, because the kernel adds up in another order, so
the gradient of a bias would have other bits than in eager mode.

Idea: the backward graph runs op by op, and ops take an operand in any layout. So the gradient that arrived takes the
place of the copy.

Known limits: only where ops of torch take the gradient, whole; slices, chunks and tiles take the copy, as do swapped
storages. A gradient that repeats along some axes only is copied where the graph takes it in another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.fxir.marks import is_tangent, is_view
from memfit.torch_compat.core import OpOverload, PlainAOTOutput, TangentAOTInput

__all__ = ["Taken", "expanded", "put_in_place", "taken_whole"]

_aten = torch.ops.aten
_RESHAPING = frozenset((_aten.view.default, _aten._unsafe_view.default, _aten.as_strided.default, _aten.view.dtype))
"""Views that need the strides that they were traced with, unless all elements are one number."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The operand of a backward graph that is the gradient of an output.

    Attributes:
        position: its position among the operands.
        reshaped: whether the graph takes it in another shape.
    """

    position: int
    reshaped: bool


def taken_whole(backward: fx.GraphModule) -> dict[int, Taken]:
    """By output of the forward pass, its gradient among the operands of a backward graph, if ops of torch take it."""
    found: dict[int, Taken] = {}
    for position, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        desc = node.meta.get("desc")
        output = desc.output if isinstance(desc, TangentAOTInput) else None
        if not is_tangent(node) or not isinstance(output, PlainAOTOutput):
            continue
        users = _users_through_views(node)
        if all(_reads_only(user) for user in users):
            found[output.idx] = Taken(position, any(user.target in _RESHAPING for user in users))
    return found


def _users_through_views(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a value or a view of it, views included."""
    found = list(node.users)
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            found += _users_through_views(user)
    return found


def _reads_only(node: fx.Node) -> bool:
    """Whether a node is a call of an op of torch that writes nothing."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "aten" and not target._schema.is_mutable


def expanded(gradients: Mapping[int, torch.Tensor], taken: Mapping[int, Taken]) -> dict[int, torch.Tensor]:
    """The gradients, by output, that repeat numbers and may take the place of their copies."""
    return {output: g for output, g in gradients.items() if output in taken and _may_replace(g, taken[output])}


def _may_replace(tensor: torch.Tensor, taken: Taken) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    repeats = [stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return any(repeats) and (all(repeats) or not taken.reshaped)


def put_in_place(operands: list[Any], gradients: Mapping[int, torch.Tensor], taken: Mapping[int, Taken]) -> None:
    """Replaces copies among the operands of a backward graph by the gradients that arrived, given by output."""
    for output, gradient in gradients.items():
        copy = operands[taken[output].position]
        if isinstance(copy, torch.Tensor) and copy.shape == gradient.shape and copy.dtype is gradient.dtype:
            operands[taken[output].position] = gradient
