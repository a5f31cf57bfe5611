"""Reduces the call overhead of a lowered graph: removes views that cancel, and calls other ops by Python bindings.

More than half the calls of a captured backward pass create views: a transpose of a transpose, a view of a view. Every
call of an `OpOverload` from Python has an overhead of one or two microseconds, twice that of Python's own binding of
the same op; with small ops or many micro-batches this overhead is visible in the step time. No bit depends on the
choice: views are metadata only and equal in both cases, and a binding dispatches the same op.

Known limits: a result that the caller gets keeps its own view, as autograd may not get one tensor twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfit.ops.op_rule import View
from memfit.ops.registry import rule_of

__all__ = ["call_cheaply"]

_aten = torch.ops.aten


def call_cheaply(graph: fx.Graph) -> None:
    """Rewrites the calls of a graph that runs without further compilation; see the module docstring."""
    for node in graph.nodes:
        source = _given_again(node)
        if source is not None:
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
        elif _reshapes(node) and _reshapes(node.args[0]):
            node.update_arg(0, node.args[0].args[0])
    for node in reversed(list(graph.nodes)):
        rule = rule_of(node.target)
        if not node.users and rule.view is not None:
            graph.erase_node(node)
        elif rule.binding is not None and not node.kwargs and not _must_be_no_view(node):
            node.target = rule.binding


def _given_again(node: fx.Node) -> fx.Node | None:
    """The earlier node whose tensor the view reproduces; None if there is none."""
    view = rule_of(node.target).view
    if view is View.NOTHING:
        return node.all_input_nodes[0]
    if view is not View.TWO_AXES:
        return None
    (inner,) = node.all_input_nodes
    if inner.target is not node.target or inner.args[1:] != node.args[1:]:
        return None
    return inner.all_input_nodes[0]


def _must_be_no_view(node: fx.Node) -> bool:
    """Whether a result must not become a view: autograd forbids in-place writes to views that a graph returned.

    The result of `_unsafe_view` does not count as a view.
    """
    return node.target is _aten._unsafe_view.default and any(user.op == "output" for user in node.users)


def _reshapes(value: Any) -> bool:
    return isinstance(value, fx.Node) and rule_of(value.target).view is View.SHAPE
