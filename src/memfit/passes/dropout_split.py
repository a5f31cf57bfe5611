"""Splits dropout in two: the mask is drawn for the whole tensor at once, so that slices of the data use the same mask.

A generator gives its numbers in a fixed order, so a kernel that draws and masks at once can run only on the whole
tensor. After the split, the draw takes a quarter of the data's bytes or less and happens as before, with the same
numbers; masking is pointwise and runs slice by slice with the ops before and after it. Eager dropout on CPU is two ops
from the start, see `memfit.capture.eager.dropout`; here its mask takes one byte per element.

Known limits: on CPU only. A `native_dropout` that the model calls itself is split only if its data are contiguous,
because the kernel draws in this order.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.marks import BASELINE_CALL, BASELINE_NBYTES
from memfit.ops.kernels.dropout import drawn, kept_scale, masked
from memfit.passes.conv_backward_split import metadata_only_attribute
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["mask_by_bytes", "split_dropout"]

_aten = torch.ops.aten


def mask_by_bytes(module: fx.GraphModule) -> None:
    """Saves masks of one byte per element where eager saves noise of the data's dtype; draws need no memory to fill."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=drawn):
        for copy in [user for user in node.users if user.target is _aten.copy.default and user.args[1] is node]:
            if _alike(copy, node):
                replace_uses(copy, node)
                graph.erase_node(copy)
        noise = next(iter(node.users), None)
        if noise is None or len(node.users) != 1 or not _take_apart(module, node, noise):
            with graph.inserting_before(node):
                node.update_arg(0, metadata_only_attribute(module, node))
    graph.eliminate_dead_code()


def _take_apart(module: fx.GraphModule, drawing: fx.Node, noise: fx.Node) -> bool:
    """Replaces noise that only multiplies by a mask; returns False if the noise has other uses."""
    value, kept = drawing.meta["val"], drawing.args[1]
    if noise.target is not _aten.div.Scalar or noise.args != (drawing, kept) or not value.dtype.is_floating_point:
        return False
    scale = kept_scale(cast(float, kept), value)
    if scale is None or not noise.users:
        return False
    products: list[tuple[fx.Node, fx.Node]] = []
    for product in noise.users:
        others = [one for one in product.args if one is not noise]
        if product.target is not _aten.mul.Tensor or len(others) != 1 or not isinstance(others[0], fx.Node):
            return False
        data = others[0].meta["val"]
        if data.shape != value.shape or data.dtype is not value.dtype:
            return False
        products.append((product, others[0]))
    graph = module.graph
    with graph.inserting_before(drawing):
        with detect_fake_mode(value) or nullcontext():
            like = torch.empty_strided(value.shape, value.stride(), dtype=torch.bool, device=value.device)
        mask = graph.call_function(drawn, (metadata_only_attribute(module, drawing, like), kept))
    with detect_fake_mode(value) or nullcontext():
        bits = torch.empty_strided(value.shape, value.stride(), dtype=torch.bool, device=value.device)
    mask.meta = {**drawing.meta, "val": bits, BASELINE_CALL: None}
    mask.meta[BASELINE_NBYTES] = value.numel() * value.element_size()
    for place, (product, data) in enumerate(products):
        with graph.inserting_before(product):
            result = graph.call_function(masked, (data, mask, scale))
        result.meta = dict(product.meta)
        if not place:
            both = {**product.meta, "val": (product.meta["val"], value)}
            result.meta[BASELINE_CALL] = Call(name=product.name, target=_dropped, args=(data, kept), meta=both)
        replace_uses(product, result)
        graph.erase_node(product)
    graph.erase_node(noise)
    graph.erase_node(drawing)
    return True


def _alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return bool(one.shape == two.shape and one.stride() == two.stride() and one.dtype is two.dtype)


def _dropped(data: torch.Tensor, kept: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of eager dropout, and the noise that it saves for the backward pass."""
    noise = torch.empty_like(data).bernoulli_(kept).div_(kept)
    return data * noise, noise


def split_dropout(module: fx.GraphModule) -> None:
    """Splits every `native_dropout` on CPU into its mask and the rest."""
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
            shape = metadata_only_attribute(module, data, like)
            mask = graph.call_function(_aten.bernoulli.p, (shape, 1 - probability))
            kept = graph.call_function(masked, (data, mask, 1 / (1 - probability)))
        # Without memfit the mask has the data's dtype.
        bits = node.meta["val"][1]
        mask.meta = {
            **node.meta,
            "val": bits,
            BASELINE_CALL: None,
            BASELINE_NBYTES: value.numel() * value.element_size(),
        }
        kept.meta = {**node.meta, "val": node.meta["val"][0], BASELINE_CALL: whole}
        for place, replacement in ((0, kept), (1, mask)):
            if place in results:
                replace_uses(results[place], replacement)
                graph.erase_node(results[place])
        graph.erase_node(node)
