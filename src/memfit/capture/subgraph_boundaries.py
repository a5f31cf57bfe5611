"""Results that a captured subgraph hands to the code after it, as the baseline step would make them.

While a model is captured subgraph by subgraph, each subgraph runs once without gradients, so that the code between the
subgraphs sees real values. That code may need more than values: torch refuses a statement or an autograd function that
writes in place to a leaf that needs a gradient, and outputs of a subgraph are no leaves in the baseline step. And a
hook that a subgraph registers on its own tensor cannot be registered without gradients; such a hook changes no result
of the forward pass.

*Idea*: one autograd node stands for a subgraph, as it does when the plan runs. Then the autograd graph of the step
exists, including the code between subgraphs, and shows which other code uses the inputs of a subgraph
(`memfit.capture.gradients.shared_inputs`). In a backward pass, such a node passes on zeros with the strides of the
subgraph's gradients, which shows in which layout the gradients of subgraph outputs arrive
(`memfit.capture.gradients.tangents`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfit.capture.gradients.tangents import Strides
from memfit.torch_compat.core import HigherOrderOperator

__all__ = ["Handed", "handed_over", "has_tensor_hooks", "lay_out_anew", "without_tensor_hooks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """Outputs that one run of a subgraph handed over, and the node that stands for the subgraph in the autograd graph.

    Attributes:
        outputs: results of the subgraph.
        node: the autograd node that stands for the subgraph; None if no gradient can arrive.
        result_of: by place of an output, its index among the results of the node.
        edge_of: by place of an input, the index of the node's edge that leads to the input.
    """

    outputs: tuple[Any, ...]
    node: Any = None
    result_of: Mapping[int, int] = field(default_factory=dict)
    edge_of: Mapping[int, int] = field(default_factory=dict)


def handed_over(
    made: Sequence[Any], results: Sequence[Any], inputs: Sequence[Any], lying: Mapping[int, Strides | None]
) -> Handed:
    """Turns outputs that a subgraph made without gradients into results of one autograd node, over the same memory.

    Args:
        made: values that the subgraph returned.
        results: Dynamo's fake tensors for these values, which tell which values need a gradient.
        inputs: inputs of the subgraph.
        lying: by place of an input that receives a gradient, the strides of the gradient; None where unknown.
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
    """Sets other strides for the gradients that the node of a subgraph passes on.

    Args:
        handed: outputs and node of the subgraph.
        inputs: inputs of the subgraph.
        lying: see `handed_over`.
    """
    if handed.node is not None:
        handed.node.like = [_layout(inputs[place], lying.get(place)) for place in handed.edge_of]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def has_tensor_hooks(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph registers a hook on a tensor."""
    return any(_is_hook(node) for node in gm.graph.nodes)


def without_tensor_hooks(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph, over the same modules, that registers no hook on a tensor."""
    graph = copy.deepcopy(gm.graph)
    for node in list(graph.nodes):
        if _is_hook(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return fx.GraphModule(gm, graph)


class _Subgraph(torch.autograd.Function):
    """Returns existing tensors, with an autograd node between them and the inputs."""

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
    """The layout of an input's gradient; None for a leaf, which no code between subgraphs made."""
    if value.is_leaf:
        return None
    strides = torch.empty_like(value, device="meta").stride() if strides is None else strides
    return value.shape, strides, value.dtype, value.device


def _is_hook(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "register_hook"
