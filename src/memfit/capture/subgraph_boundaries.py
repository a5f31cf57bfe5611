"""Results that a captured subgraph hands to the code after it, as the plain step would make them.

While a model is captured subgraph by subgraph, each subgraph runs once without gradients, so that the code between the
subgraphs sees real values. That code may ask for more: an autograd function or a statement that writes in place is
refused by torch on a leaf that needs a gradient, and what a subgraph makes is no leaf in the plain step. And a hook
that a subgraph registers on a tensor of its own has nothing to hang on without gradients; it changes no result of the
forward pass.

*Idea*: one node of autograd's stands for a subgraph, as it does when the plan runs. The autograd graph of the step is
then there, its code between subgraphs included, and tells who else uses what a subgraph takes
(`memfit.capture.gradients.shared_inputs`). Run backward, such a node hands on zeros that lie as the gradients of the
subgraph do, which tells in which layout the gradients of its outputs come (`memfit.capture.gradients.tangents`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfit.capture.gradients.tangents import Strides

__all__ = ["Handed", "handed_over", "has_tensor_hooks", "lay_out_anew", "without_tensor_hooks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """Outputs that one run of a subgraph handed over, and the node that stands for it in autograd's graph.

    Attributes:
        outputs: its results.
        node: of autograd's, stands for the subgraph; None if no gradient can come.
        result_of: by places among the outputs which result of the node it is.
        edge_of: by places among the inputs which of the node's edges leads to it.
    """

    outputs: tuple[Any, ...]
    node: Any = None
    result_of: Mapping[int, int] = field(default_factory=dict)
    edge_of: Mapping[int, int] = field(default_factory=dict)


def handed_over(
    made: Sequence[Any], results: Sequence[Any], inputs: Sequence[Any], lying: Mapping[int, Strides | None]
) -> Handed:
    """Outputs that a subgraph made without gradients, over the same memory, as results of one node of autograd's.

    Args:
        made: what it returned.
        results: fake tensors of Dynamo's for it, which tell what needs a gradient.
        inputs: what it took.
        lying: by places among the inputs that receive a gradient how that lies; None where that is unknown.
    """
    places = [
        place
        for place, (value, result) in enumerate(zip(made, results, strict=True))
        if isinstance(value, torch.Tensor) and result.requires_grad and not value.requires_grad
    ]
    if not places:
        return Handed(outputs=tuple(made))
    reached = [place for place, value in enumerate(inputs) if place in lying and _needs_gradient(value)]
    anchor = torch.empty(0, device=made[places[0]].device, requires_grad=True)
    with torch.enable_grad():
        handed = _Subgraph.apply(
            [made[place].data for place in places],
            [lying[place] for place in reached],
            anchor,
            *(inputs[place] for place in reached),
        )
    outputs = list(made)
    for place, value in zip(places, handed, strict=True):
        outputs[place] = value
    return Handed(
        outputs=tuple(outputs),
        node=handed[0].grad_fn,
        result_of={place: result for result, place in enumerate(places)},
        # Edges lead to tensors only, the first to the anchor.
        edge_of={place: edge for edge, place in enumerate(reached, start=1)},
    )


def lay_out_anew(handed: Handed, inputs: Sequence[Any], lying: Mapping[int, Strides | None]) -> None:
    """Has the node of a subgraph hand on gradients that lie otherwise than it was told first.

    Args:
        handed: what the subgraph handed over.
        inputs: what it took.
        lying: see `handed_over`.
    """
    if handed.node is not None:
        handed.node.like = [_layout(inputs[place], lying.get(place)) for place in handed.edge_of]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


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


class _Subgraph(torch.autograd.Function):
    """Tensors that are there already, with a node of autograd's between them and others."""

    @staticmethod
    def forward(ctx: Any, made: list[torch.Tensor], lying: list[Strides | None], *inputs: torch.Tensor) -> Any:
        ctx.like = [_layout(value, strides) for value, strides in zip(inputs[1:], lying, strict=True)]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, *(like and _zeros(*like) for like in ctx.like)


def _zeros(shape: Sequence[int], strides: Strides, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def _layout(value: torch.Tensor, strides: Strides | None) -> tuple[Any, ...] | None:
    """Of the gradient of an input; None for a leaf, which no code between subgraphs made."""
    if value.is_leaf:
        return None
    strides = torch.empty_like(value, device="meta").stride() if strides is None else strides
    return value.shape, strides, value.dtype, value.device


def _is_hook(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "register_hook"
