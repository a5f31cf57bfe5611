"""Views of its own results that a graph both returns and uses: their gradients are added up at the view.

Where an output is a view of a result, AOTAutograd makes the view outside of the compiled graph, from that result. The
result then receives the gradient of the output, and as another gradient that of the graph's own uses of the view. Eager
autograd adds the two at the view, which rounds differently. (Views of inputs:
`memfit.capture.gradients.returned_views`.)

*Idea*: such an output goes through an op that passes it on. For AOTAutograd the op's result is a tensor like any other,
with its own gradient, and the op is removed from the joint graph (`memfit.passes.used_views`), so that the view itself
is returned.

Known limits: code that asks whether a view made under `torch.no_grad()` requires a gradient is told that it does not,
where eager says that it does. A view of a storage that the graph overwrites stays as it is. For autograd the result of
the op is not a view: code that writes to it in place gets an error from torch.
"""

from __future__ import annotations

import torch
from torch import fx

from memfit.capture.dynamo.dynamo_graph import is_in_place, outputs_of
from memfit.ops.kernels.handed_on import handed_on

__all__ = ["cut_views_without_gradients", "hand_on_used_views"]


def cut_views_without_gradients(gm: fx.GraphModule) -> None:
    """Detaches outputs of a Dynamo graph that are views made under `torch.no_grad()`.

    Such a view says that it requires a gradient, as the tensor it is a view of does, but has no `grad_fn`, so that no
    gradient flows through it. AOTAutograd makes the view anew outside of `no_grad`, and passes a gradient on.
    """
    (output,) = gm.graph.find_nodes(op="output")
    cut: dict[fx.Node, fx.Node] = {}
    for node in outputs_of(gm):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and value._is_view() and value.requires_grad and value.grad_fn is None:
            with gm.graph.inserting_before(output):
                cut[node] = gm.graph.call_method("detach", (node,))
            cut[node].meta["example_value"] = value.detach()
    if cut:
        output.args = (fx.node.map_arg(output.args[0], lambda node: cut.get(node, node)),)
        gm.recompile()


def hand_on_used_views(gm: fx.GraphModule) -> None:
    """Puts the op in front of each output of a Dynamo graph that is such a view."""
    (output,) = gm.graph.find_nodes(op="output")
    views = _used_views(gm)
    if not views:
        return
    handed: dict[fx.Node, fx.Node] = {}
    # Right before the end: the gradient of later code comes first, as in eager.
    with gm.graph.inserting_before(output):
        for view in views:
            handed[view] = gm.graph.call_function(handed_on, (view,))
            handed[view].meta = dict(view.meta)
    output.args = (fx.node.map_arg(output.args[0], lambda node: handed.get(node, node)),)
    gm.recompile()


def _used_views(gm: fx.GraphModule) -> list[fx.Node]:
    """Views of results that the graph returns and that its other nodes use."""
    returned = {node for node in outputs_of(gm) if isinstance(node, fx.Node)}
    written = {key for node in gm.graph.nodes if is_in_place(node) for key in map(_storage, node.all_input_nodes)}
    given = {_storage(node) for node in gm.graph.find_nodes(op="placeholder")}
    found = []
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node not in returned or len(node.users) < 2 or not isinstance(value, torch.Tensor):
            continue
        if value.requires_grad and value._is_view() and _storage(node) not in written | given:
            found.append(node)
    return found


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
