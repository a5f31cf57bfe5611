"""Makes views of inputs that a subgraph both returns and uses, before the subgraph is called.

AOTAutograd makes an output that is a view of an input outside of the compiled graph, from the input. The gradient of
such an output then bypasses the graph: where later code and the subgraph both use the view, the input receives the sum
of the subgraph's own uses as one gradient and the gradient of later code as another. Eager autograd adds up all of them
at the view, the last use first, which rounds differently.

*Idea*: such views are made under autograd before the subgraph is called, and the subgraph takes them as inputs. Then
the subgraph returns this input itself, and later code and the subgraph use one tensor, as in eager mode
(`memfit.capture.gradients.shared_inputs` does the rest).

Known limits: a view of a storage that the graph overwrites stays in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memfit.capture.dynamo.dynamo_graph import is_in_place, outputs_of
from memfit.capture.gradients.shared_inputs import static_example

__all__ = ["Views", "calling_after", "no_views", "returned_views_first"]

Views = Callable[..., tuple[torch.Tensor, ...]]
"""Makes views from all inputs of a graph; to be called with gradients enabled."""


def no_views(*_: Any) -> tuple[torch.Tensor, ...]:
    """Makes no views."""
    return ()


def returned_views_first(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], Views]:
    """Splits a Dynamo graph into the views that are made first and the rest.

    Args:
        gm: the graph.
        inputs: examples of its inputs.

    Returns:
        The rest, which takes the views after all other inputs; examples of its inputs; and the function that makes the
        views.
    """
    views = _returned_and_used(gm)
    if not views:
        return gm, list(inputs), no_views
    first = _only(gm, views)
    with torch.enable_grad():
        examples = [static_example(view) for view in first(*inputs)]
    return _rest(gm, views), [*inputs, *examples], first


def calling_after(views: Views, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the compiled rest of a graph so that it is called with the inputs of the whole graph."""
    if views is no_views:
        return call

    def run(*operands: Any) -> Any:
        return call(*operands, *views(*operands))

    return run


def _returned_and_used(gm: fx.GraphModule) -> list[fx.Node]:
    """Views of inputs that the graph returns and that its other nodes use."""
    returned = {node for node in outputs_of(gm) if isinstance(node, fx.Node)}
    written = {key for node in gm.graph.nodes if is_in_place(node) for key in map(_storage, node.all_input_nodes)}
    of_inputs: set[fx.Node] = set()
    found = []
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if node.op == "placeholder":
            of_inputs.add(node)
        elif value._is_view() and len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in of_inputs:
            of_inputs.add(node)
            if node in returned and len(node.users) > 1 and _storage(node) not in written:
                found.append(node)
    return found


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _only(gm: fx.GraphModule, views: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of the graph that makes the views."""
    wanted = set(views)
    for view in reversed(list(gm.graph.nodes)):
        if view in wanted:
            wanted.update(view.all_input_nodes)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[view] for view in views))
    return fx.GraphModule(gm, graph)


def _rest(gm: fx.GraphModule, views: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph without the nodes that make the views, which it takes after its other inputs."""
    graph = fx.Graph()
    copied = {node: graph.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")}
    for view in views:
        copied[view] = graph.placeholder(f"{view.name}_before")
        copied[view].meta = dict(view.meta)
    for node in gm.graph.nodes:
        if node not in copied:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    rest = fx.GraphModule(gm, graph)
    rest.meta = {}  # Dynamo's `meta` has a source for each input
    return rest
