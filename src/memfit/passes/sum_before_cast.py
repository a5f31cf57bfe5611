"""Adds up gradients of weights that autocast casts once before they are cast back, as eager mode does.

See `memfit.capture.eager.cast_weights` for the weights that are cast once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfit.passes.replace_uses import replace_uses

__all__ = ["sum_before_casting"]

_aten = torch.ops.aten


_HALF = (torch.bfloat16, torch.float16)


def sum_before_casting(module: fx.GraphModule, num_forward_outputs: int, weights: frozenset[int]) -> None:
    """Adds up the half-precision gradients of each of the `weights` before they are cast.

    Args:
        module: a joint graph; rewritten in place.
        num_forward_outputs: how many of its outputs belong to the forward pass.
        weights: places of the weights among the inputs.
    """
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    gradients = list(output.args[0])[num_forward_outputs:]
    for place in sorted(weights):
        gradient = gradients[place] if place < len(gradients) else None
        if isinstance(gradient, fx.Node):
            _sum_before_casting(graph, gradient)


def _sum_before_casting(graph: fx.Graph, gradient: fx.Node) -> None:
    sums = _sums(gradient)
    if not sums:
        return
    terms: list[Any] = [sums[0].args[0], *(node.args[1] for node in sums)]
    halves = [t for t in terms if _half_of(t) is not None]
    if len(halves) < 2 or len({t.args[0].meta["val"].dtype for t in halves}) > 1:
        return
    before: fx.Node | None = None
    half: fx.Node | None = None
    for term, at in zip(terms, (sums[0], *sums), strict=True):
        with graph.inserting_before(at):
            narrow = _half_of(term)
            if narrow is None:
                before = term if before is None else _made(graph, at, _aten.add.Tensor, (before, term), {})
                continue
            half = narrow if half is None else _made(graph, at, _aten.add.Tensor, (half, narrow), {})
            if term is halves[-1]:
                cast = _made(graph, at, term.target, (half,), dict(term.kwargs))
                before = cast if before is None else _made(graph, at, _aten.add.Tensor, (before, cast), {})
    assert before is not None
    replace_uses(gradient, before)
    for node in (*reversed(sums), *halves):
        if not node.users:
            graph.erase_node(node)


def _sums(gradient: fx.Node) -> list[fx.Node]:
    """The additions by which autograd sums gradients one after the other, the first addition first."""
    found: list[fx.Node] = []
    node: Any = gradient
    while node.target is _aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        if found and len(node.users) > 1:
            break
        found.append(node)
        node = node.args[0]
    return found[::-1]


def _half_of(node: Any) -> fx.Node | None:
    """The half-precision tensor that a node casts to float32; None if the node is no such cast."""
    if node.target is not _aten._to_copy.default or len(node.users) > 1 or node.meta["val"].dtype is not torch.float32:
        return None
    source: fx.Node = node.args[0]
    return source if source.meta["val"].dtype in _HALF else None


def _made(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[fx.Node, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Creates a call with the origin of another node."""
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    values = [a.meta["val"] for a in args]
    with values[0].fake_mode:
        node.meta["val"] = target(*values, **kwargs)
    node.meta.pop("tensor_meta", None)
    return node
