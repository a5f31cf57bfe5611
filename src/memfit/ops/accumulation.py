"""Ops that can add their result to an existing gradient directly, so that it needs no memory of its own.

Between micro-batches, gradients of weights are added up. The weight gradient of a linear layer is a matrix product, and
BLAS multiplies and adds in one call; the gradient of an embedding is zero except for the rows that were looked up; the
weight gradient of a convolution is a product too (`memfit.ops.kernels.conv_weight_gemm`). A gradient that is made first
and added then is written and read once more, which in a wide output layer takes more time than the product itself.

A direct sum is rounded differently, so it is for gradients that are sums of several micro-batches anyway.

Known limits: embeddings on CPU only, because on CUDA their sum would depend on the order in which threads arrive; and
without `padding_idx` and `scale_grad_by_freq`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any, cast

import torch
from torch import fx

from memfit.ops.kernels.conv_weight_gemm import add_weight_product, is_weight_product

__all__ = ["ADDING", "Accumulate", "can_add"]

_aten = torch.ops.aten


class Accumulate(StrEnum):
    """How gradients of parameters are added to `.grad` inside the step (`memfit.runtime.grad_accumulation`)."""

    WHOLE = "whole"
    """Each gradient is made and then added, as autograd does, with the bits of autograd."""

    AS_MADE = "as made"
    """The op that makes the gradient adds it directly, if it can."""


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: int = 1) -> None:
    total.addmm_(left, right, beta=beta)


def _add_rows(total: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, *_: Any, beta: int = 1) -> None:
    if beta == 0:
        total.zero_()
    total.index_add_(0, indices.flatten(), gradient.reshape(indices.numel(), -1))


ADDING: dict[Any, Callable[..., None]] = {
    _aten.mm.default: _add_product,
    _aten.embedding_dense_backward.default: _add_rows,
    _aten.convolution_backward.default: add_weight_product,
}
"""For each op, the function that adds the result of the op to its first argument; the op's own arguments follow.

With `beta=0` the result is written over the first argument.
"""


def can_add(made: fx.Node) -> bool:
    """Whether the call that makes this gradient can add it to an existing gradient."""
    call = cast(fx.Node, made.args[0]) if made.target is operator.getitem else made
    if call.target is _aten.embedding_dense_backward.default:
        padding, by_frequency = call.args[3:5]
        return bool(call.meta["val"].device.type == "cpu" and padding == -1 and not by_frequency)
    if call.target is _aten.convolution_backward.default:
        return is_weight_product(call)
    return call.target in ADDING and not call.kwargs
