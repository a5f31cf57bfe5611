"""Removes the op that passes views on (`memfit.capture.gradients.used_views`) from a joint graph."""

from __future__ import annotations

from torch import fx

from memfit.ops.kernels.handed_on import handed_on
from memfit.passes.replace_uses import replace_uses

__all__ = ["take_out"]


def take_out(joint: fx.GraphModule) -> None:
    """Removes the op from a joint graph, whose results are then the views themselves."""
    for node in joint.graph.find_nodes(op="call_function", target=handed_on):
        replace_uses(node, node.args[0])
        joint.graph.erase_node(node)
