"""Rewrites of the joint graph for the lever `tile`, along rows: the tokens of a batch, or samples that are vectors.

A language model projects each token onto its vocabulary, takes the logarithm of the softmax and picks one number of the
result; the three tensors of tokens times vocabulary are often the largest of a step, and no token needs the rows of
another token. Two computations of this chain look at all tokens: the mean of the losses, and the weight gradient, a
matrix product that sums over the tokens. Here the mean becomes a sum and a quotient, and the weight gradient becomes a
call that can add to the result of other rows, so that the whole chain can run a few rows at a time
(`memfit.ops.batching.axes`).

The gradient is linear in the gradient of the loss, a single number. So it is computed for a loss gradient of one right
after the loss, from the same slices, and multiplied by that number in the backward pass: nothing is recomputed. Only
the gradients of the projection's operands are saved in between. The idea is that of fused linear cross entropy (Hsu et
al. 2024, "Liger Kernel", arXiv:2410.10989).

The module must compute the loss, and must not return the projection, because the whole projection would then be saved.

Known limits: only classes given by index, along the last of two axes.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.marks import is_tangent, is_view, original
from memfit.ops.kernels.row_products import SUM, product_over_rows, share_of_mean
from memfit.ops.registry import rule_of
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["RUNS_ONCE", "rewrite_by_rows"]

_aten = torch.ops.aten

_MEAN = 1


_PER_ROW = (_aten._log_softmax.default, _aten._to_copy.default)
"""Ops, in addition to views, that may be between a projection and its loss."""


RUNS_ONCE = "memfit_runs_once"
"""Mark in the `meta` of a node of the forward pass that is never worth recomputing."""


def rewrite_by_rows(module: fx.GraphModule) -> None:
    """Turns mean losses into sums, makes weight gradients by calls that add up, and moves a loss's gradients to it."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        if node.args[3] == _MEAN:
            _split_mean(node)
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        one = _transposed(cast(fx.Node, node.args[0]))
        if one is not None:
            node.target, node.args = product_over_rows, (one, node.args[1])
    for node in graph.find_nodes(op="call_function", target=_aten.nll_loss_backward.default):
        _bring_forward(node)
    for node in graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        _close_ranks(node)


def _split_mean(node: fx.Node) -> None:
    """Replaces a mean loss by the sum of the losses over the sum of the weights; the kernel returns both sums."""
    graph, (data, target, weight, _, ignored) = node.graph, cast(tuple[Any, ...], node.args)
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if 0 not in results or len(results) != len(node.users):
        return
    value = node.meta["val"]
    with graph.inserting_before(node):
        sums = graph.call_function(cast(Any, node.target), (data, target, weight, SUM, ignored))
        loss, weights = (graph.call_function(operator.getitem, (sums, place)) for place in (0, 1))
        mean = graph.call_function(_aten.div.Tensor, (loss, weights))
    with detect_fake_mode(list(value)) or nullcontext():
        mean_value = value[0] / value[1]
    sums.meta = dict(node.meta)
    loss.meta, weights.meta = ({**node.meta, "val": value[place]} for place in (0, 1))
    mean.meta = {**node.meta, "val": mean_value}
    for place, replacement in ((0, mean), (1, weights)):
        if place in results:
            replace_uses(results[place], replacement)
            graph.erase_node(results[place])
    graph.erase_node(node)


def _transposed(node: fx.Node) -> fx.Node | None:
    """The row matrix that a node is the transposed view of; None if the node is no such view."""
    is_view = node.target is _aten.t.default or (
        node.target in (_aten.permute.default, _aten.transpose.int) and node.meta["val"].dim() == 2
    )
    source = node.args[0] if is_view else None
    if not isinstance(source, fx.Node) or source.meta["val"].shape != node.meta["val"].shape[::-1]:
        return None
    return source if source.meta["val"].is_contiguous() and source.op != "placeholder" else None


def _close_ranks(loss: fx.Node) -> None:
    """Moves the other operands of a loss, mostly labels, before its projection, because only adjacent ops are fused."""
    first = cast(fx.Node, loss.args[0])
    while first.target in _PER_ROW or (first.op == "call_function" and is_view(first)):
        first = cast(fx.Node, first.args[0])
    if not rule_of(first.target).reads_matrix:
        return
    depend, node = {first}, first.next
    while node is not loss:
        following = node.next
        if depend.isdisjoint(node.all_input_nodes) and not node.is_impure() and not _draws_numbers(node):
            first.prepend(node)
        else:
            depend.add(node)
        node = following


def _draws_numbers(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _bring_forward(node: fx.Node) -> None:
    """Computes the results of a loss's gradient right after the loss, for a gradient of one, and scales them later."""
    graph, (gradient, data, target, weight, reduction, ignored, weights) = node.graph, cast(tuple[Any, ...], node.args)
    losses = [user for user in original(data).users if user.target is _aten.nll_loss_forward.default]
    softmax = next(iter(node.users), None)
    if len(losses) != 1 or losses[0].args[3] != SUM or reduction not in (_MEAN, SUM) or len(node.users) != 1:
        return
    if softmax is None or softmax.target is not _aten._log_softmax_backward_data.default or softmax.args[0] is not node:
        return
    products = _products_of(softmax)
    early = _Early(losses[0])
    early.made[gradient] = early.made[weights] = gradient  # neither is needed early
    if products is None or not all(map(early.can_make, products)):
        return
    if not all(_is_linear(product, _Early(losses[0])) for product in products):
        return
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_function")):
        like = weights.meta["val"]
        one = graph.call_function(_aten.full.default, ([], 1.0), {"dtype": like.dtype, "device": like.device})
    one.meta = {**node.meta, "val": _beside(like)}
    early.made[gradient] = early.made[weights] = one
    losses[0].meta[RUNS_ONCE] = True  # its results are two numbers, and all its operands would be recomputed
    scale = gradient
    if reduction == _MEAN:
        with graph.inserting_before(node):
            scale = graph.call_function(share_of_mean, (gradient, weights))
        scale.meta = {**node.meta, "val": _beside(like)}
    node.args = (gradient, data, target, weight, SUM, ignored, weights)
    for product in products:
        made = early.of(product)
        made.meta = {**product.meta, "val": _beside(product.meta["val"]), RUNS_ONCE: True}
        with graph.inserting_before(product):
            scaled = graph.call_function(_aten.mul.Tensor, (made, scale))
        scaled.meta = {**product.meta}
        replace_uses(product, scaled)
        graph.erase_node(product)


def _is_linear(product: fx.Node, before: _Early) -> bool:
    """Whether only one operand depends on the gradient, and a sum over rows cannot overflow before it is scaled."""
    late = [a for a in product.args if isinstance(a, fx.Node) and not before.can_make(a)]
    return len(late) == 1 and product.meta["val"].dtype is not torch.float16


def _beside(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor like another one, in its own storage."""
    with detect_fake_mode(value) or nullcontext():
        return torch.empty_like(value)


def _products_of(node: fx.Node) -> list[fx.Node] | None:
    """Products of a matrix and sums over its rows, also through views and casts; None if any other op reads it."""
    found: list[fx.Node] = []
    for user in node.users:
        is_row_wise = user.target is _aten.mm.default and user.args[0] is node
        is_sum = user.target is _aten.sum.dim_IntList and user.args[1] == [0]
        if is_row_wise or is_sum or (user.target is product_over_rows and node in user.args):
            found.append(user)
        elif is_view(user) or user.target is _aten._to_copy.default:
            further = _products_of(user)
            if further is None:
                return None
            found += further
        else:
            return None
    return found


class _Early:
    """Makes nodes of the backward pass right after a node of the forward pass."""

    def __init__(self, after: fx.Node) -> None:
        self.graph, self.before = after.graph, after.next
        self.made: dict[fx.Node, fx.Node] = {}
        nodes = list(self.graph.nodes)
        self.there = {node for node in nodes[: nodes.index(after)] if not is_tangent(node)}

    def can_make(self, node: fx.Node) -> bool:
        """Whether a node depends only on earlier nodes and on nodes in `made`."""
        if node in self.made or node in self.there:
            return True
        return node.op == "call_function" and not node.is_impure() and all(map(self.can_make, node.all_input_nodes))

    def of(self, node: fx.Node) -> fx.Node:
        """The early copy of a node; the node itself if it is early already."""
        if node in self.there:
            return node
        if node not in self.made:
            operands = {operand: self.of(operand) for operand in node.all_input_nodes}
            with self.graph.inserting_before(self.before):
                self.made[node] = self.graph.node_copy(node, operands.__getitem__)
        return self.made[node]
