"""Computes weight gradients of convolutions over concatenations, operand by operand.

The weight gradient of a convolution that reads a concatenation (the long skips of a U-Net, the branches of Inception)
needs the whole concatenation in the backward pass, in addition to its operands, which are mostly saved anyway for the
gradients of their activations. But the weight gradient of some input channels needs these channels only. So each
operand makes its own part of the weight gradient, one after the other, and the concatenation is neither saved nor
recomputed.

Kernels are chosen by shape, so the parts have the bits of the whole for most shapes but not for all: the profiler
compares the bits (`memfit.profiling.benchmark.whole_if_separable`), and a graph is read with the profiler's results.

Known limits: only concatenations along channels, read by convolutions without groups, on CPU.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.marks import SEPARATED, returned_storages, storage_key
from memfit.fxir.signature import cost_key, describe
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = [
    "is_separable_key",
    "operands_of_data",
    "separable_key",
    "separable_weight_gradients",
    "separate_weight_gradients",
    "separated_keys",
]

_aten = torch.ops.aten

_FROM = " from "


def separable_weight_gradients(graph: fx.Graph) -> list[fx.Node]:
    """Weight gradients that could be made in parts, one part for each operand of a concatenation."""
    returned = returned_storages(graph)
    placeholders = {storage_key(node) for node in graph.find_nodes(op="placeholder")}

    def is_ours(node: fx.Node) -> bool:
        # The caller may overwrite its own tensors before the backward pass.
        key = storage_key(node)
        return key is not None and key not in returned and key not in placeholders

    found: list[fx.Node] = []
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        _, data, weight, *_, groups, mask = cast(tuple[Any, ...], node.args)
        if data.target is not _aten.cat.default or mask[0] or not mask[1] or groups != 1:
            continue
        value, result = data.meta["val"], node.meta["val"][1]
        dimension = data.args[1] if len(data.args) > 1 else data.kwargs.get("dim", 0)
        operands = operands_of_data(node)
        if (
            value.device.type == "cpu"
            and dimension % value.dim() == 1
            and value.shape[1] == weight.meta["val"].shape[1]
            and result.is_contiguous()
            and len(operands) > 1
            and all(is_ours(n) and n.meta["val"].dtype == value.dtype for n in operands)
            # Kernels also depend on storage offsets, and the profiler's operands have offset 0.
            and all(n.meta["val"].storage_offset() == 0 for n in operands)
            and all(user.target is operator.getitem for user in node.users)
        ):
            found.append(node)
    return found


def operands_of_data(node: fx.Node | Call) -> list[fx.Node]:
    """Nodes whose concatenation is the data of a convolution's backward."""
    return list(cast(Any, node.args[1]).args[0])


def separable_key(call: fx.Node | Call) -> str:
    """Key of the properties that decide whether the parts have the bits of the whole."""
    return f"{cost_key(call)}{_FROM}{describe(operands_of_data(call))}"


def is_separable_key(key: str) -> bool:
    """Whether a key of known costs was made by `separable_key`."""
    return _FROM in key


def separate_weight_gradients(graph: fx.Graph, separate: Callable[[str], bool]) -> None:
    """Rewrites weight gradients so that they are made part by part.

    Args:
        graph: rewritten in place.
        separate: whether the parts have the bits of the whole, given the `separable_key`.
    """
    for node in separable_weight_gradients(graph):
        key = separable_key(node)
        if separate(key):
            node.meta[SEPARATED] = key
            _separate(graph, node)


def separated_keys(graph: fx.Graph) -> frozenset[str]:
    """The keys of the weight gradients that are made part by part."""
    return frozenset(node.meta[SEPARATED] for node in graph.nodes if SEPARATED in node.meta)


def _separate(graph: fx.Graph, node: fx.Node) -> None:
    gradient, _, weight, *rest = cast(tuple[Any, ...], node.args)
    *settings, mask = rest
    of_weight = node.meta["val"][1]
    results = {user.args[1]: user for user in node.users}
    operands = operands_of_data(node)
    stops = list(itertools.accumulate(operand.meta["val"].shape[1] for operand in operands))
    parts: list[fx.Node] = []
    of_bias: fx.Node | None = None

    def call(target: Any, args: tuple[Any, ...]) -> fx.Node:
        made = graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with detect_fake_mode(of_weight) or nullcontext():
            made.meta = {**node.meta, "val": target(*values)}
        return made

    with graph.inserting_before(node):
        for number, (operand, start, stop) in enumerate(zip(operands, [0, *stops], stops, strict=False)):
            channels = call(_aten.slice.Tensor, (weight, 1, start, stop))
            bias = bool(mask[2]) and number == 0
            made = call(node.target, (gradient, operand, channels, *settings, [False, True, bias]))
            parts.append(call(operator.getitem, (made, 1)))
            if bias and 2 in results:
                of_bias = call(operator.getitem, (made, 2))
                of_bias.meta = {**results[2].meta, "val": of_bias.meta["val"]}
        together = graph.call_function(_aten.cat.default, (parts, 1))
        together.meta = {**node.meta, "val": of_weight}
    if 1 in results:
        replace_uses(results[1], together)
        graph.erase_node(results[1])
    if of_bias is not None:
        replace_uses(results[2], of_bias)
        graph.erase_node(results[2])
    graph.erase_node(node)
