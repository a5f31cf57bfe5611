"""Splits batch normalisation in the joint graph for the lever `tile`: the same gradients up to rounding.

Batch normalisation takes statistics of the whole batch and then normalises the batch with them, so no result exists
before the whole batch is read; its backward kernel works in the same way. After the split, each half works sample by
sample: the first half makes sums, the second takes a few numbers per channel. Then each half can run slice by slice
with the ops before and after it (`memfit.ops.batching.axes`, `memfit.passes.fused_cross_entropy`).

Known limits: training mode, with running statistics, weight and bias.
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.ops.kernels.batch_norm import input_gradient_from_sums, normalise, statistics_from_sums, sums_of_data
from memfit.ops.recompute import lies_as
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["split_batch_norm", "split_batch_norm_backward"]

_aten = torch.ops.aten


def split_batch_norm(module: fx.GraphModule) -> None:
    """Splits every batch normalisation into its sums, its statistics and the rest."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten._native_batch_norm_legit_functional.default):
        data, weight, bias, running_mean, running_var, training, momentum, eps = cast(tuple[Any, ...], node.args)
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        values, shape = node.meta["val"], data.meta["val"].shape
        count = math.prod(shape) // shape[1]
        known = len(results) == len(node.users) and 0 in results
        if training is not True or not known or count < 2 or not _is_splittable(data, weight):
            continue
        if not lies_as(normalise, (data, *values[1:3], weight, bias), values[0]):
            continue
        with graph.inserting_before(node):
            sums = graph.call_function(sums_of_data, (data,))
            with detect_fake_mode(data.meta["val"]) or nullcontext():
                like = torch.empty((2, shape[1]), dtype=torch.float64, device=values[0].device)
            sums.meta = {**node.meta, "val": like}
            statistics = graph.call_function(
                statistics_from_sums, (sums, running_mean, running_var, count, momentum, eps, values[1].dtype)
            )
            statistics.meta = {**node.meta, "val": values[1:]}
            mean, invstd = (_result(graph, statistics, place, results.get(place + 1)) for place in (0, 1))
            made = graph.call_function(normalise, (data, mean, invstd, weight, bias))
            made.meta = {**node.meta, "val": values[0]}
        replace_uses(results.pop(0), made)
        for place, user in results.items():
            replace_uses(user, _result(graph, statistics, place - 1, user))
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)


def _result(graph: fx.Graph, node: fx.Node, place: int, like: fx.Node | None) -> fx.Node:
    """The node that takes one of several results; created if there is none."""
    for user in node.users:
        if user.args[1] == place:
            return user
    with graph.inserting_after(node):
        taken = graph.call_function(operator.getitem, (node, place))
    taken.meta = dict(like.meta) if like is not None else {**node.meta, "val": node.meta["val"][place]}
    return taken


def split_batch_norm_backward(module: fx.GraphModule) -> None:
    """Splits every batch normalisation's backward pass into its sums and the input's gradient."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.native_batch_norm_backward.default):
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if not _can_split(node) or results.keys() != {0, 1, 2} or len(node.users) != 3:
            continue
        gradient, data, weight, _, _, mean, invstd, *_ = cast(tuple[Any, ...], node.args)
        values = node.meta["val"]
        count = data.meta["val"].numel() // data.meta["val"].shape[1]
        parts = (gradient, data, weight, mean, invstd, *values[1:3], count)
        if not lies_as(input_gradient_from_sums, parts, values[0]):
            continue
        with graph.inserting_before(node):
            sums = graph.call_function(node.target, (*node.args[:-1], [False, True, True]))
            sums.meta = {**node.meta, "val": (None, *values[1:])}
            of_weight, of_bias = (graph.call_function(operator.getitem, (sums, place)) for place in (1, 2))
            of_weight.meta, of_bias.meta = dict(results[1].meta), dict(results[2].meta)
            made = graph.call_function(
                input_gradient_from_sums, (gradient, data, weight, mean, invstd, of_weight, of_bias, count)
            )
            made.meta = {**node.meta, "val": values[0]}
        for user, replacement in ((results[0], made), (results[1], of_weight), (results[2], of_bias)):
            replace_uses(user, replacement)
            graph.erase_node(user)
        graph.erase_node(node)


def _can_split(node: fx.Node) -> bool:
    _, data, weight, *_ = cast(tuple[Any, ...], node.args)
    is_whole = node.args[7] is True and list(cast(list[bool], node.args[9])) == [True, True, True]
    return is_whole and _is_splittable(data, weight)


def _is_splittable(data: fx.Node, weight: fx.Node | None) -> bool:
    value = data.meta["val"]
    return bool(weight is not None and value.dim() >= 2 and value.dtype in (torch.float32, torch.float64))
