"""Results that a captured piece hands to the code after it, as the plain step would make them.

While a model is captured piece by piece, each piece runs once without gradients, so that the code between the pieces
sees real values. That code may ask for more: an autograd function or a statement that writes in place is refused by
torch on a leaf that needs a gradient, and what a piece makes is no leaf in the plain step. And a hook that a piece
registers on a tensor of its own has nothing to hang on without gradients; it changes no result of the forward pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

__all__ = ["as_made_with_gradient", "has_tensor_hooks", "without_tensor_hooks"]


def as_made_with_gradient(made: Any, result: Any) -> Any:
    """What a piece made without gradients; not a leaf, over the same memory, if its fake result needs a gradient."""
    if not isinstance(made, torch.Tensor) or not result.requires_grad or made.requires_grad:
        return made
    with torch.enable_grad():
        handed: torch.Tensor = _Handed.apply(made, torch.empty(0, device=made.device, requires_grad=True))
    return handed


def has_tensor_hooks(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's registers a hook on a tensor."""
    return any(_is_hook(node) for node in gm.graph.nodes)


def without_tensor_hooks(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo's over the same modules that registers no hook on a tensor."""
    graph = copy.deepcopy(gm.graph)
    for node in list(graph.nodes):
        if _is_hook(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return fx.GraphModule(gm, graph)


class _Handed(torch.autograd.Function):
    """A tensor over the memory of another, with a node of autograd's."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return made.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _is_hook(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "register_hook"
