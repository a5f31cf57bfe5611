"""Rewrites of the joint graph for the lever `tile`: the same gradients up to rounding.

Batch normalisation's backward kernel takes sums over the batch and then, with these, makes the input's gradient, so
nothing of the batch can be done before all of it is there. Apart, each half treats sample by sample: the sums are the
gradients of weight and bias, and the rest takes them as two numbers per channel. Then each half can run slice by slice
with what comes before and after it (`memfit.capture.by_samples`).

Known limits: training mode, with weight and bias; CPU.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from memfit.capture.again import Call
from memfit.capture.batch_norm import input_gradient_from_sums
from memfit.capture.concatenations import PLAIN_CALL

__all__ = ["split_batch_norm_backward"]

_aten = torch.ops.aten


def split_batch_norm_backward(module: fx.GraphModule) -> None:
    """Splits every batch normalisation's backward pass into its sums and the input's gradient."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.native_batch_norm_backward.default):
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if not _can_split(node) or results.keys() != {0, 1, 2} or len(node.users) != 3:
            continue
        gradient, data, weight, _, _, mean, invstd, *_ = cast(tuple[Any, ...], node.args)
        values = node.meta["val"]
        whole = Call(name=node.name, target=node.target, args=node.args, meta=node.meta)
        with graph.inserting_before(node):
            sums = graph.call_function(node.target, (*node.args[:-1], [False, True, True]))
            sums.meta = {**node.meta, "val": (None, *values[1:]), PLAIN_CALL: None}
            of_weight, of_bias = (graph.call_function(operator.getitem, (sums, place)) for place in (1, 2))
            of_weight.meta, of_bias.meta = dict(results[1].meta), dict(results[2].meta)
            count = data.meta["val"].numel() // data.meta["val"].shape[1]
            made = graph.call_function(
                input_gradient_from_sums, (gradient, data, weight, mean, invstd, of_weight, of_bias, count)
            )
            made.meta = {**node.meta, "val": values[0], PLAIN_CALL: whole}
        for user, replacement in ((results[0], made), (results[1], of_weight), (results[2], of_bias)):
            user.replace_all_uses_with(replacement)
            graph.erase_node(user)
        graph.erase_node(node)


def _can_split(node: fx.Node) -> bool:
    _, data, weight, *_ = cast(tuple[Any, ...], node.args)
    value = data.meta["val"]
    return bool(
        weight is not None
        and node.args[7] is True
        and list(cast(list[bool], node.args[9])) == [True, True, True]
        and value.device.type == "cpu"
        and value.dim() >= 2
        and value.dtype in (torch.float32, torch.float64)
    )
