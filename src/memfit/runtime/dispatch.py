"""Calls what a lowered graph runs cheaply: views that cancel are not made, others go by Python's own bindings.

More than half the calls of a captured backward pass make views: a transpose of a transpose, a view of a view. Every
call of an `OpOverload` from Python takes one or two microseconds of its own, twice what Python's own binding of the
same op takes; with small ops or many micro-batches that is seen in the step. No bit depends on it: views make metadata
only, the same by either way, and a binding dispatches the same op.

Known limits: what the caller gets keeps its own view, as autograd may not get one tensor twice.
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
"""The same ops with the same positional arguments."""

_SAME = (_aten.detach.default, _aten.alias.default)
"""They give what they are given."""

_CANCEL = (_aten.t.default, _aten.transpose.int)
"""Twice with the same arguments they give what was there."""


def call_cheaply(graph: fx.Graph) -> None:
    """Rewrites the calls of a graph that runs as it is; see the module docstring."""
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
    """The node whose tensor a view gives again, if it does."""
    if node.target in _SAME:
        return node.all_input_nodes[0]
    if node.target not in _CANCEL:
        return None
    (inner,) = node.all_input_nodes
    if inner.target is not node.target or inner.args[1:] != node.args[1:]:
        return None
    return inner.all_input_nodes[0]


def _must_be_no_view(node: fx.Node) -> bool:
    """Autograd forbids to write over a view that a graph returned; what `_unsafe_view` makes counts as none."""
    return node.target is _aten._unsafe_view.default and any(user.op == "output" for user in node.users)


def _is_view(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target in (_aten.view.default, _aten._unsafe_view.default)
