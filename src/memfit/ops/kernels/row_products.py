"""Products over rows and sums over rows: the parts of the gradient of a projection and its loss, slice by slice.

A vocabulary projection, its cross entropy and their gradients run over a few rows (tokens) at a time; the weight
gradient is then a sum of products, and each product is added to the sum in place.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.ops.kernels.library import custom_op

__all__ = ["SUM", "add_product_over_rows", "product_over_rows", "share_of_mean"]

SUM = 2
"""The reduction code of losses that stands for a sum; the code of a mean is one less."""


def _as_product(result: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
    return torch.ops.aten.mm.default, (one.t(), other), result


@custom_op("product_over_rows(Tensor one, Tensor other) -> Tensor", flops_of=_as_product)
def product_over_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The transpose of one matrix times another matrix, a sum over their rows.

    Args:
        one: of shape [rows, M].
        other: of shape [rows, N].
    """
    return one.t().mm(other)


def add_product_over_rows(one: torch.Tensor, other: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Adds the product of some rows to a sum, of shape [M, N], in place."""
    return total.addmm_(one.t(), other)


@custom_op("share_of_mean(Tensor gradient, Tensor weights) -> Tensor")
def share_of_mean(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of a mean divided by the sum of the weights; zero where that sum is zero."""
    return torch.where(weights == 0, 0.0, gradient / weights)
