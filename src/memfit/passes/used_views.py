"""Takes the op that hands views on (`memfit.capture.gradients.used_views`) out of a joint graph again."""

from __future__ import annotations

from torch import fx

from memfit.ops.kernels.handed_on import handed_on

__all__ = ["take_out"]


def take_out(joint: fx.GraphModule) -> None:
    """Takes the op out of a joint graph, whose results are the views themselves then."""
    for node in joint.graph.find_nodes(op="call_function", target=handed_on):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
