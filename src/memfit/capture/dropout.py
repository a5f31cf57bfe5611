"""Dropout in two: its mask is drawn for the whole tensor at once, so that slices of its data meet the same mask.

A generator gives its numbers in their order, so a kernel that draws and masks at once can run whole only. Apart, the
draw is a quarter of the data's bytes or less and happens as before, with the same numbers; masking is pointwise and
runs slice by slice with what comes before and after it.

Known limits: CPU and contiguous data, where the kernel draws in just this way; other dropout runs whole.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode

from memfit.capture.again import Call
from memfit.capture.concatenations import PLAIN_CALL
from memfit.capture.rewrite import PLAIN_NBYTES, hollow_attribute

__all__ = ["masked", "split_dropout"]

_aten = torch.ops.aten


def masked(data: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """What dropout keeps, scaled, with the bits of the kernel."""
    return data.mul(mask).mul_(data.new_tensor(scale))  # rounded as the data are


def split_dropout(module: fx.GraphModule) -> None:
    """Splits every dropout into its mask and the rest."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.native_dropout.default):
        data, probability, training = cast(tuple[Any, ...], node.args)
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        value = data.meta["val"]
        known = len(results) == len(node.users) and value.device.type == "cpu" and value.is_contiguous()
        if not training or not 0 < probability < 1 or not known:
            continue
        whole = Call(name=node.name, target=node.target, args=node.args, meta=dict(node.meta))
        with graph.inserting_before(node):
            with detect_fake_mode(value) or nullcontext():
                like = torch.empty_like(value, dtype=torch.bool)
            shape = hollow_attribute(module, data, like)
            mask = graph.call_function(_aten.bernoulli.p, (shape, 1 - probability))
            kept = graph.call_function(masked, (data, mask, 1 / (1 - probability)))
        # Without memfit the mask has the data's dtype.
        drawn = node.meta["val"][1]
        mask.meta = {**node.meta, "val": drawn, PLAIN_CALL: None, PLAIN_NBYTES: value.numel() * value.element_size()}
        kept.meta = {**node.meta, "val": node.meta["val"][0], PLAIN_CALL: whole}
        for place, replacement in ((0, kept), (1, mask)):
            if place in results:
                results[place].replace_all_uses_with(replacement)
                graph.erase_node(results[place])
        graph.erase_node(node)
