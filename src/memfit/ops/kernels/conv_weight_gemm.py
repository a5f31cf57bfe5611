"""A convolution's weight gradient as a matrix product that is added to the existing gradient.

The weight gradient is the product of the output gradient and the values that the kernel sees at each position.
Convolution kernels are made for large images; where images are small and channels many, as deep in a network, a matrix
product is several times as fast, and BLAS adds it to the existing gradient in the same call. The result is rounded
differently, so this is for gradients that are sums anyway (`memfit.ops.accumulation`).

Pointwise convolutions are products without copies, sample by sample, or one product of transposed copies of all samples
where these copies are small compared to the weight. Other convolutions copy each value that the kernel sees ("im2col",
Chellapilla et al. 2006), which pays off where positions are fewer than channels.

Known limits: on CPU, where it was measured; without groups; no transposed convolutions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional

from memfit.ops.kernels.settings import multiplies_in_full

__all__ = ["add_weight_product", "is_weight_product", "separate_weight_products"]

_aten = torch.ops.aten

_WEIGHT_ONLY = [False, True, False]
_DATA_ONLY = [True, False, False]


def is_weight_product(node: fx.Node) -> bool:
    """Whether a call of `convolution_backward` makes only a weight gradient, which is faster as a product."""
    return list(cast(Any, node.args[-1])) == _WEIGHT_ONLY and _can_be_product(node)


def separate_weight_products(graph: fx.Graph) -> None:
    """Gives such a gradient a call of its own where one call makes several and only the graph output reads it."""
    for node in graph.find_nodes(op="call_function", target=_aten.convolution_backward.default):
        of_data, of_weight, of_bias = cast(list[bool], node.args[-1])
        results = {user.args[1]: user for user in node.users}
        if not of_weight or not (of_data or of_bias) or not _can_be_product(node):
            continue
        if 1 not in results or any(user.op != "output" for user in results[1].users):
            continue
        values = node.meta["val"]
        with graph.inserting_before(node):
            if 2 in results:
                total = _sum_over_samples(graph, cast(fx.Node, node.args[0]))
                total.meta = {**node.meta, "val": values[2]}
                results[2].replace_all_uses_with(total)
                graph.erase_node(results[2])
            alone = graph.call_function(node.target, (*node.args[:-1], _WEIGHT_ONLY))
            alone.meta = {**node.meta, "val": (None, values[1], None)}
        results[1].update_arg(0, alone)
        if 0 in results:
            node.update_arg(len(node.args) - 1, _DATA_ONLY)
            node.meta["val"] = (values[0], None, None)
        else:
            graph.erase_node(node)


def add_weight_product(
    total: torch.Tensor,
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    *settings: Any,
    beta: int = 1,
) -> None:
    """Adds the weight gradient to `total`.

    Args:
        total: tensor of the shape of the weight; becomes `beta` times itself plus the gradient.
        gradient: gradient of the convolution's output.
        data: input of the convolution.
        weight: weight of the convolution; only its shape is used.
        bias_sizes: not read.
        settings: arguments of `convolution_backward`: stride, padding, dilation and the following ones.
        beta: 0 to write over `total`.
    """
    if not total.is_contiguous():  # the caller's own tensor
        made = torch.empty_like(total, memory_format=torch.contiguous_format)
        add_weight_product(made, gradient, data, weight, bias_sizes, *settings, beta=0)
        total.copy_(made) if beta == 0 else total.add_(made)
        return
    rows = total.view(len(total), -1)
    for gradients, seen in _factors(gradient, data, weight, *settings[:3]):
        rows.addmm_(gradients, seen.t(), beta=beta)
        beta = 1
        del gradients, seen  # they may be copies


def _factors(
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Output gradients by channel and position, and the values the kernel sees there: of all samples, or of each."""
    kernel = weight.shape[2:]
    at_once = len(data) != 1
    if kernel.numel() > 1:
        data = functional.unfold(data, tuple(kernel), tuple(dilation), tuple(padding), tuple(stride))
    else:
        if max(stride) > 1:
            data = data[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]
        # All at once where copies are small; otherwise each sample would read and write the larger weight.
        copied = math.prod(gradient.shape[2:]) * len(data) * (data.shape[1] + gradient.shape[1])
        at_once = at_once and copied <= 2 * weight.numel()
    if at_once:
        yield _channels_first(gradient), _channels_first(data)
        return
    for one_gradient, one in zip(gradient.unbind(), data.unbind(), strict=True):
        yield one_gradient.flatten(1), one.flatten(1)


def _sum_over_samples(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    dims = [dim for dim in range(gradient.meta["val"].dim()) if dim != 1]
    return graph.call_function(_aten.sum.dim_IntList, (gradient, dims))


def _can_be_product(node: fx.Node) -> bool:
    gradient, data, weight, _, stride, padding, dilation, transposed, _, groups, _ = cast(tuple[Any, ...], node.args)
    gradient, data, weight = (n.meta["val"] for n in (gradient, data, weight))
    kernel = weight.shape[2:]
    if (
        transposed
        or groups != 1
        or weight.device.type != "cpu"
        or weight.dtype not in (torch.float32, torch.float64)
        or not multiplies_in_full(weight.dtype)  # convolution kernels may still multiply in full
        or not weight.is_contiguous()
        or not len(stride) == len(padding) == len(dilation) == len(kernel) == data.dim() - 2
        or any(user.target is not operator.getitem for user in node.users)
    ):
        return False
    if _is_pointwise(kernel):
        return not any(padding)
    return len(kernel) == 2 and 2 * len(gradient) * math.prod(gradient.shape[2:]) <= weight.shape[0]


def _is_pointwise(kernel: Sequence[int]) -> bool:
    return all(length == 1 for length in kernel)


def _channels_first(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix: channels by positions of all samples."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1)
