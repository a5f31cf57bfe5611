"""Reduces the call overhead of a lowered graph: removes views that cancel, and calls other ops by Python bindings.

More than half the calls of a captured backward pass create views: a transpose of a transpose, a view of a view. Every
call of an `OpOverload` from Python has an overhead of one or two microseconds, twice that of Python's own binding of
the same op; with small ops or many micro-batches this overhead is visible in the step time. No bit depends on the
choice: views are metadata only and equal in both cases, and a binding dispatches the same op.

Known limits: a result that the caller gets keeps its own view, as autograd may not get one tensor twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["call_cheaply"]

_aten = torch.ops.aten

_VIEWS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.view.default: torch.Tensor.view,
    _aten.expand.default: torch.Tensor.expand,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.select.int: torch.select,
    _aten.as_strided.default: torch.as_strided,
    _aten.detach.default: torch.detach,
    _aten._unsafe_view.default: torch.Tensor.view,
}

_BINDINGS: dict[Any, Callable[..., Any]] = {
    **_VIEWS,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.convolution.default: torch.convolution,
    _aten.native_batch_norm.default: torch.native_batch_norm,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.native_group_norm.default: torch.native_group_norm,
    _aten.native_dropout.default: torch.native_dropout,
    _aten.embedding.default: torch.embedding,
    _aten.relu.default: torch.relu,
    _aten.relu_.default: torch.relu_,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.add.Tensor: torch.add,
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.mul.Tensor: torch.mul,
    _aten.mul_.Tensor: torch.Tensor.mul_,
    _aten.sub.Tensor: torch.sub,
    _aten.div.Tensor: torch.div,
    _aten.where.self: torch.where,
    _aten.sum.dim_IntList: torch.sum,
    _aten.mean.dim: torch.mean,
}
"""Python bindings of ops, with the same positional arguments."""

_SAME = (_aten.detach.default, _aten.alias.default)
"""Ops that return their input."""

_CANCEL = (_aten.t.default, _aten.transpose.int)
"""Ops that cancel when applied twice with the same arguments."""


def call_cheaply(graph: fx.Graph) -> None:
    """Rewrites the calls of a graph that runs without further compilation; see the module docstring."""
    for node in graph.nodes:
        source = _given_again(node)
        if source is not None:
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
        elif _is_view(node) and _is_view(node.args[0]):
            node.update_arg(0, node.args[0].args[0])
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.target in _VIEWS or node.target in _SAME):
            graph.erase_node(node)
        elif node.target in _BINDINGS and not node.kwargs and not _must_be_no_view(node):
            node.target = _BINDINGS[node.target]


def _given_again(node: fx.Node) -> fx.Node | None:
    """The earlier node whose tensor the view reproduces; None if there is none."""
    if node.target in _SAME:
        return node.all_input_nodes[0]
    if node.target not in _CANCEL:
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


def _is_view(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target in (_aten.view.default, _aten._unsafe_view.default)
