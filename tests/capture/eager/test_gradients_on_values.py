"""Products have eager's gradients, whether a factor is zero or not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.bits import same_bits


class Product(nn.Module):
    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.product = nn.Linear(6, 12), nn.Linear(12, 12), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.after(torch.tanh(self.before(x))))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "product",
    [
        lambda h: (h + 1).prod() * h,
        lambda h: h.prod(1),
        lambda h: h.transpose(0, 1).prod(1, keepdim=True) * h[0, 0],
        lambda h: h.prod(0, dtype=torch.float64),
        lambda h: h.cumprod(1),
        lambda h: h.where(h > 0.1, 0).prod(),
        lambda h: h.where(h > 0.1, 0).prod(-1),
        lambda h: h.where(h > 0.1, 0).T.cumprod(-2),
    ],
    ids=["all", "axis", "transposed", "wider", "running", "all, zeros", "axis, zeros", "running, zeros"],
)
def test_bits_of_eager(product: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    plain, x = Product(product), torch.randn(9, 6)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda o: o.square().mean())
    for model in (plain, fitted):
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad)
