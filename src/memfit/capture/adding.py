"""Ops of which the result can be added to a gradient as it is made, without memory of its own.

Between micro-batches gradients of weights are added up. That of a linear layer is a product of matrices, and BLAS
multiplies and adds at once; that of an embedding is zero but for the rows that were looked up. Made first and added
then, each would be written and read again, which in a wide output layer takes more time than the product itself.

The sum is rounded otherwise, so this is for gradients that are sums of several micro-batches anyway.

Known limits: embeddings on CPU only, as their sum on CUDA would depend on the order in which threads come; and without
`padding_idx` and `scale_grad_by_freq`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import fx

__all__ = ["ADDING", "Accumulate", "can_add"]

_aten = torch.ops.aten


class Accumulate(StrEnum):
    """How gradients of parameters are added to `.grad` inside the step (`memfit.runtime.accumulate`)."""

    WHOLE = "whole"
    """Each is made and then added, as autograd does, with its bits."""

    AS_MADE = "as made"
    """The op that makes it adds it, if it can."""


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    total.addmm_(left, right)


def _add_rows(total: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, *_: Any) -> None:
    total.index_add_(0, indices.flatten(), gradient.reshape(indices.numel(), -1))


ADDING: dict[Any, Callable[..., None]] = {
    _aten.mm.default: _add_product,
    _aten.embedding_dense_backward.default: _add_rows,
}
"""Of ops what adds their result to its first argument, given the op's own arguments after that."""


def can_add(node: fx.Node) -> bool:
    """Whether this call can add its result to what is there."""
    if node.target is _aten.embedding_dense_backward.default:
        padding, by_frequency = node.args[3:5]
        return bool(node.meta["val"].device.type == "cpu" and padding == -1 and not by_frequency)
    return node.target in ADDING and not node.kwargs
