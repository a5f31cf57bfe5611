"""Verifies a joint graph after a pass: order, shapes, layouts and aliases.

A pass copies what it does not change, so only nodes that are new or have other operands are verified again. Each of
them is called on fake tensors that lie as the values of its operands do, and its result must have the shape, dtype,
strides and device that its `meta` states, and share memory with the operands that its `meta` says.

Known limits: kernels that fake tensors cannot run, and calls that write to an operand, are not verified, nor are
strides of axes with one element. Bits are
compared elsewhere (`memfit.compiler.proof`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memfit.errors import MemfitError
from memfit.torch_compat.core import OpOverload, detect_fake_mode, pytree

__all__ = ["GraphError", "changed_nodes", "node_states", "verify"]

State = tuple[Any, ...]


class GraphError(MemfitError):
    """A pass left a graph that is not what it says; a fault of memfit."""


def node_states(graph: fx.Graph) -> dict[fx.Node, State]:
    """The call, the operands and the result of each node."""
    return {node: _state(node) for node in graph.nodes}


def changed_nodes(graph: fx.Graph, before: Mapping[fx.Node, State]) -> list[fx.Node]:
    """Nodes that are new, or differ from an earlier state, and their users, in the order of the graph."""
    changed = {node for node in graph.nodes if node not in before or before[node] != _state(node)}
    return [node for node in graph.nodes if node in changed or not changed.isdisjoint(node.all_input_nodes)]


def verify(graph: fx.Graph, nodes: Sequence[fx.Node], name: str) -> None:
    """Verifies nodes of a graph, and the order of all.

    Args:
        graph: a joint graph.
        nodes: the nodes that a pass changed.
        name: name of the pass.

    Raises:
        GraphError: naming the pass, the node and the fault.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise GraphError(f"after the pass {name!r}: {error}; please report this") from error
    for node in nodes:
        for fault in _faults(node):
            raise GraphError(f"after the pass {name!r}: {node.format_node()} {fault}; please report this")


def _state(node: fx.Node) -> State:
    return node.target, node.args, node.kwargs, id(node.meta.get("val"))


def _faults(node: fx.Node) -> Iterator[str]:
    if node.op != "call_function" or _writes(node):
        return
    if "val" not in node.meta:
        yield "has no value"
        return
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    mode = detect_fake_mode([*values, node.meta["val"]])
    if mode is None:
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    try:
        with mode, torch.no_grad():
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # no fake kernel, or one that wants values
        return
    found, stated = pytree.tree_leaves(made), pytree.tree_leaves(node.meta["val"])
    if len(found) != len(stated):
        yield f"returns {len(found)} values, not {len(stated)}"
        return
    for one, other in zip(found, stated, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            yield from _differences(one, other, values)


def _writes(node: fx.Node) -> bool:
    """Whether a call writes to an operand, which is a value of the graph."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _differences(made: torch.Tensor, stated: torch.Tensor, operands: Sequence[Any]) -> Iterator[str]:
    for what, one, other in (
        ("shape", tuple(made.shape), tuple(stated.shape)),
        ("dtype", made.dtype, stated.dtype),
        ("device", made.device, stated.device),
        ("strides", _strides(made), _strides(stated)),
    ):
        if one != other:
            yield f"makes {what} {one}, and its value says {other}"
            return
    given = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    is_view, says = (any(_shares(t, operand) for operand in given) for t in (made, stated))
    if is_view != says:
        yield f"{'is a view' if is_view else 'has memory of its own'}, and its value says otherwise"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
