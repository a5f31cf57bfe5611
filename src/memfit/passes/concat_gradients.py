"""Gives each slice of a concatenation's gradient its own storage.

This gradient is one tensor, and its slices go to different readers: with a long skip of a U-Net, one slice is read much
later than the others and would keep all of them alive. Two rewrites avoid this, and neither changes a bit:

- where the gradient comes from a convolution, the input half of the convolution's backward writes each slice to its own
  storage, a few samples at a time if it runs in chunks (`memfit.ops.chunking`), so that the whole gradient never
  exists;
- any other slice that is read long after the rest is copied out.

A separate slice has another layout than a slice of the whole, and kernels that sum then add up in another order (the
backward pass of batch normalisation on CPU does). So both rewrites are done only where all readers have the same bits
for any layout: readers that add, multiply or mask element by element, and convolutions, which copy an operand that is
not contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.marks import is_view
from memfit.ops.kernels.convolution import convolution_input_gradient, convolution_input_slices, takes_input_shape_only
from memfit.ops.registry import rule_of
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["Cuts", "copy_out_late_slices", "separate_input_slices"]

_aten = torch.ops.aten

_MUCH_LATER = 12
"""The least number of ops between the last other use of a tensor and the first use of a slice, to copy the slice."""

Cuts = tuple[tuple[int, int], ...]
"""Channels of each slice: the first, and the one after the last."""


def separate_input_slices(module: fx.GraphModule) -> None:
    """Makes input gradients of convolutions as separate slices if they are read in slices of channels."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=convolution_input_gradient):
        readers = list(node.users)
        if len(readers) < 2 or not all(_is_channel_slice(user) and _for_any_layout(user) for user in readers):
            continue
        value: torch.Tensor = node.meta["val"]
        if not value.is_contiguous():
            continue
        cuts: Cuts = tuple(slice(*user.args[2:4]).indices(value.shape[1])[:2] for user in readers)
        with graph.inserting_before(node):
            made = graph.call_function(convolution_input_slices, (*node.args, cuts))
        slices = [_contiguous(user.meta["val"]) for user in readers]
        made.meta = {**node.meta, "val": tuple(slices)}
        for number, user in enumerate(readers):
            with graph.inserting_before(node):
                item = graph.call_function(operator.getitem, (made, number))
            item.meta = {**user.meta, "val": slices[number]}
            replace_uses(user, item)
            graph.erase_node(user)
        graph.erase_node(node)


def _is_channel_slice(node: fx.Node) -> bool:
    if node.target is not _aten.slice.Tensor or len(node.args) != 4 or not node.users:
        return False
    _, dimension, *ends = node.args
    return bool(dimension == 1) and all(isinstance(end, int) for end in ends)


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    with detect_fake_mode(like) or nullcontext():
        return torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)


def copy_out_late_slices(module: fx.GraphModule) -> None:
    """Copies a slice of a backward result if the slice is read long after all other uses of the result."""
    graph = module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    first_tangent = min((position[n] for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name), default=0)

    def uses(node: fx.Node) -> list[int]:
        return [position[reader] for reader in _readers(node)]

    for node in graph.find_nodes(op="call_function", target=_aten.slice.Tensor):
        base, value = node.args[0], node.meta["val"]
        whole = base.meta.get("val")
        if not isinstance(whole, torch.Tensor) or base.op != "call_function" or position[base] < first_tangent:
            continue
        rest = [
            p for user in base.users if user is not node for p in (uses(user) if is_view(user) else [position[user]])
        ]
        own = uses(node)
        if not rest or not own or not value.numel() < whole.numel():
            continue
        if min(own) - max(rest) >= _MUCH_LATER and not is_view(base) and _for_any_layout(node):
            with graph.inserting_after(base):
                early = graph.node_copy(node)
            early.meta = dict(node.meta)
            with graph.inserting_after(early):
                copied = graph.call_function(_aten.clone.default, (early,))
            with detect_fake_mode(value) or nullcontext():
                copied.meta = {**node.meta, "val": torch.empty_like(value)}
            position[early] = position[copied] = position[base]
            replace_uses(node, copied)
            graph.erase_node(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read the node, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
        else:
            yield user


def _for_any_layout(node: fx.Node) -> bool:
    """Whether all readers of the node have the same bits for any layout of it."""
    return all(_same_in_any_layout(reader) for reader in _readers(node))


def _same_in_any_layout(reader: fx.Node) -> bool:
    if reader.target in (convolution_input_gradient, convolution_input_slices):
        return True
    if reader.target is _aten.convolution_backward.default:
        _, data, weight, *rest, (_, _, bias) = cast(tuple[Any, ...], reader.args)
        if not bias:
            return True
        # oneDNN sums the bias gradient from its own layout, other kernels from the operand's layout.
        value = data.meta["val"]
        return value.device.type == "cpu" and takes_input_shape_only(value, weight.meta["val"], *rest)
    rule = rule_of(reader.target)
    # With `alpha`, an addition also multiplies, and is rounded once or twice.
    return rule.is_pointwise and rule.slices_keep_bits and not reader.kwargs
