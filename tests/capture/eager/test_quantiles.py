"""Quantiles of equal elements have eager's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.bits import same_bits

QUANTILES: dict[str, Callable[[Tensor], Tensor]] = {
    "last axis": lambda h: h - torch.quantile(h, 0.3, -1, keepdim=True),
    "first axis": lambda h: h * torch.quantile(h, 0.7, 0),
    "of all": lambda h: h * torch.quantile(h, 0.45),
    "several": lambda h: h * torch.quantile(h, torch.tensor([0.2, 0.6]), 1, keepdim=True).sum(0),
    "lower": lambda h: h - torch.quantile(h, 0.5, 1, keepdim=True, interpolation="lower"),
    "not NaN": lambda h: h - torch.nanquantile(h, 0.4, 1, keepdim=True),
    "transposed": lambda h: h.mT - h.mT.quantile(0.4, 1, keepdim=True),
}


class Quantile(nn.Module):
    def __init__(self, quantile: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.quantile = nn.Linear(6, 12), quantile

    def forward(self, x: Tensor) -> Tensor:
        running = torch.cummax(self.before(x), -1).values
        return self.quantile(running.cos().cummax(1).values)


@pytest.mark.smoke
@pytest.mark.parametrize("name", QUANTILES)
def test_bits_of_eager(name: str) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        plain, x = Quantile(QUANTILES[name]), torch.randn(5, 9, 6)
        fitted = copy.deepcopy(plain)
        memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda o: o.square().sum(), search_seconds=0.1)
        for model in (plain, fitted):
            model(x).square().sum().backward()
        for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad)
