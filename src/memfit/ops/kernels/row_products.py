"""Products over rows and sums over rows: the parts of the gradient of a projection and its loss, slice by slice.

A vocabulary projection, its cross entropy and their gradients run over a few rows (tokens) at a time; the weight
gradient is then a sum of products, and each product is added to the sum in place.
"""

from __future__ import annotations

import torch

__all__ = ["SUM", "product_over_rows", "share_of_mean"]

SUM = 2
"""The reduction code of losses that stands for a sum; the code of a mean is one less."""


def product_over_rows(one: torch.Tensor, other: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose of one matrix times another matrix, a sum over their rows.

    Args:
        one: of shape [rows, M].
        other: of shape [rows, N].
        total: of shape [M, N]; the product is added to it in place.
    """
    if total is None:
        return one.t().mm(other)
    return total.addmm_(one.t(), other)


def share_of_mean(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The gradient of a mean divided by the sum of the weights; zero where that sum is zero."""
    return torch.where(weights == 0, 0.0, gradient / weights)
