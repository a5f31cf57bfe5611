"""Queries and changes of a Dynamo graph, before AOTAutograd traces it."""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from memfit.torch_compat.core import make_graph_module, use_lazy_graph_module

__all__ = [
    "accumulated_inputs",
    "all_but",
    "attach_outputs",
    "copied",
    "detach_outputs",
    "graph_key",
    "in_place_nodes",
    "is_in_place",
    "outputs_of",
    "reads_numbers",
    "returned_inputs",
    "weights_made",
]

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def graph_key(gm: fx.GraphModule) -> str:
    """A key of a Dynamo graph: a hash of its calls, and of the names and tensor metadata of its inputs."""
    lines = []
    for node in gm.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        told = (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {node.name} {node.target if isinstance(node.target, str) else ''} {told}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def accumulated_inputs(inputs: Sequence[Any]) -> frozenset[int]:
    """Places of a graph's inputs that are parameters whose gradients go only to `.grad`, not to hooks."""
    return frozenset(
        place
        for place, value in enumerate(inputs)
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and not value._backward_hooks
        and not value._post_accumulate_grad_hooks
    )


def in_place_nodes(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the nodes of a Dynamo graph that overwrite their operand."""
    return frozenset(node.name for node in gm.graph.nodes if is_in_place(node))


def is_in_place(node: fx.Node) -> bool:
    """Whether a call in a Dynamo graph overwrites its operand."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:
        return name in ("iadd", "isub", "imul", "itruediv")
    try:
        arguments = inspect.signature(cast(Callable[..., Any], node.target)).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a builtin
        return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))
    return bool(arguments.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def all_but(gm: fx.GraphModule, places: frozenset[int]) -> frozenset[int] | None:
    """Places of all outputs except `places`; None if `places` is empty."""
    return frozenset(range(len(outputs_of(gm)))) - places if places else None


def detach_outputs(gm: fx.GraphModule, gradient_outputs: frozenset[int] | None) -> list[int]:
    """Detaches the outputs that receive no gradient, which AOTAutograd would otherwise feed with zero tangents.

    Returns:
        Positions of the detached outputs.
    """
    positions: list[int] = []
    if gradient_outputs is None:
        return positions
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    for position, node in enumerate(results):
        if position in gradient_outputs or not isinstance(node, fx.Node):
            continue
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad:
            with gm.graph.inserting_before(output):
                cut = gm.graph.call_method("detach", (node,))
            cut.meta["example_value"] = value.detach()
            results[position] = cut
            positions.append(position)
    output.args = (tuple(results),)
    gm.recompile()
    return positions


def attach_outputs(gm: fx.GraphModule, positions: Sequence[int]) -> None:
    """Undoes `detach_outputs`."""
    (output,) = gm.graph.find_nodes(op="output")
    results = list(output.args[0])
    cut = {position: results[position] for position in positions}
    for position, node in cut.items():
        results[position] = node.args[0]
    output.args = (tuple(results),)
    for node in cut.values():
        gm.graph.erase_node(node)
    gm.recompile()


def reads_numbers(gm: fx.GraphModule) -> bool:
    """Whether numbers are read from tensors: Python rounds and promotes numbers differently than tensors of a graph."""
    return any(isinstance(node.meta.get("example_value"), _NUMBERS) for node in gm.graph.nodes)


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """The nodes and constants that the graph returns."""
    (output,) = gm.graph.find_nodes(op="output")
    return list(output.args[0])


def returned_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """Places of the inputs that the graph returns unchanged."""
    results = outputs_of(gm)
    return frozenset(place for place, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in results)


def weights_made(gm: fx.GraphModule, inputs: Sequence[Any], held: frozenset[int]) -> frozenset[int]:
    """Places of the outputs that are computed from the module's own tensors alone and are more than a number.

    Hooks leave such outputs on a module: the weight that spectral normalization or pruning computes. No code
    differentiates such a weight again, unlike an auxiliary loss.

    Args:
        gm: the graph.
        inputs: its inputs.
        held: ids of the module's parameters and buffers.
    """
    own: dict[fx.Node, bool] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        own[node] = id(value) in held
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            behind = node.all_input_nodes
            own[node] = bool(behind) and all(own[one] for one in behind)
    return frozenset(
        place
        for place, node in enumerate(outputs_of(gm))
        if isinstance(node, fx.Node) and own[node] and getattr(node.meta.get("example_value"), "ndim", 0) > 0
    )


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph over the same modules; its code is generated when it is called."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    with use_lazy_graph_module(True):
        copy = make_graph_module(gm, graph)
    copy.meta = dict(gm.meta)
    return copy
