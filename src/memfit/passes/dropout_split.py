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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from memfit.ops.kernels.dropout import drawn, kept_scale, masked
from memfit.passes.conv_backward_split import metadata_only_attribute
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["mask_by_bytes", "noise_at_once", "split_dropout"]

_aten = torch.ops.aten


def mask_by_bytes(module: fx.GraphModule) -> None:
    """Saves masks of one byte per element where eager saves noise of the data's dtype; draws need no memory to fill."""
    _replace_draws(module, _mask)


def noise_at_once(module: fx.GraphModule) -> None:
    """Makes the result of a dropout and its noise in one call, as eager does; its steps need no memory of their own."""
    _replace_draws(module, _noise)


def _replace_draws(module: fx.GraphModule, replace: Callable[[fx.GraphModule, _Noise], bool]) -> None:
    """Replaces draws, which only say what they fill, by a function for noise that only multiplies."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=drawn):
        for copy in [user for user in node.users if user.target is _aten.copy.default and user.args[1] is node]:
            if _alike(copy, node):
                replace_uses(copy, node)
                graph.erase_node(copy)
        found = _noise_of(node)
        if found is None or not replace(module, found):
            with graph.inserting_before(node):
                node.update_arg(0, metadata_only_attribute(module, node))
    graph.eliminate_dead_code()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """Noise that only multiplies.

    Attributes:
        drawing: the node that draws zeros and ones.
        noise: the node that divides them by the probability of a one.
        products: the products with the noise, and the data in each.
    """

    drawing: fx.Node
    noise: fx.Node
    products: tuple[tuple[fx.Node, fx.Node], ...]


def _noise_of(drawing: fx.Node) -> _Noise | None:
    """The noise that is made of a draw; None if the draw or the noise has other uses."""
    value, kept = drawing.meta["val"], drawing.args[1]
    noise = next(iter(drawing.users), None)
    if noise is None or len(drawing.users) != 1 or not noise.users or not value.dtype.is_floating_point:
        return None
    if noise.target is not _aten.div.Scalar or noise.args != (drawing, kept):
        return None
    products: list[tuple[fx.Node, fx.Node]] = []
    for product in noise.users:
        others = [one for one in product.args if one is not noise]
        if product.target is not _aten.mul.Tensor or len(others) != 1 or not isinstance(others[0], fx.Node):
            return None
        data = others[0].meta["val"]
        if data.shape != value.shape or data.dtype is not value.dtype:
            return None
        products.append((product, others[0]))
    return _Noise(drawing=drawing, noise=noise, products=tuple(products))


def _noise(module: fx.GraphModule, found: _Noise) -> bool:
    graph, drawing, data_of = module.graph, found.drawing, dict(found.products)
    first = found.noise.next  # products are known in the order in which they were traced, not in that of the graph
    while first not in data_of:
        first = first.next
    data = data_of[first]
    with graph.inserting_before(first):
        both = graph.call_function(eager_dropout, (data, drawing.args[1]))
        result, noise = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
    both.meta = {**first.meta, "val": (first.meta["val"], drawing.meta["val"])}
    result.meta, noise.meta = dict(first.meta), dict(drawing.meta)
    replace_uses(first, result)
    graph.erase_node(first)
    replace_uses(found.noise, noise)
    graph.erase_node(found.noise)
    graph.erase_node(drawing)
    return True


def _mask(module: fx.GraphModule, found: _Noise) -> bool:
    graph, drawing, noise = module.graph, found.drawing, found.noise
    value, kept = drawing.meta["val"], drawing.args[1]
    scale = kept_scale(cast(float, kept), value)
    if scale is None:
        return False
    with graph.inserting_before(drawing):
        with detect_fake_mode(value) or nullcontext():
            like = torch.empty_strided(value.shape, value.stride(), dtype=torch.bool, device=value.device)
        mask = graph.call_function(drawn, (metadata_only_attribute(module, drawing, like), kept))
    with detect_fake_mode(value) or nullcontext():
        bits = torch.empty_strided(value.shape, value.stride(), dtype=torch.bool, device=value.device)
    mask.meta = {**drawing.meta, "val": bits}
    for product, data in found.products:
        with graph.inserting_before(product):
            result = graph.call_function(masked, (data, mask, scale))
        result.meta = dict(product.meta)
        replace_uses(product, result)
        graph.erase_node(product)
    graph.erase_node(noise)
    graph.erase_node(drawing)
    return True


def _alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return bool(one.shape == two.shape and one.stride() == two.stride() and one.dtype is two.dtype)


def eager_dropout(data: torch.Tensor, kept: float) -> tuple[torch.Tensor, torch.Tensor]:
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
        with graph.inserting_before(node):
            with detect_fake_mode(value) or nullcontext():
                like = torch.empty_like(value, dtype=torch.bool)
            shape = metadata_only_attribute(module, data, like)
            mask = graph.call_function(_aten.bernoulli.p, (shape, 1 - probability))
            kept = graph.call_function(masked, (data, mask, 1 / (1 - probability)))
        mask.meta = {**node.meta, "val": node.meta["val"][1]}
        kept.meta = {**node.meta, "val": node.meta["val"][0]}
        for place, replacement in ((0, kept), (1, mask)):
            if place in results:
                replace_uses(results[place], replacement)
                graph.erase_node(results[place])
        graph.erase_node(node)
