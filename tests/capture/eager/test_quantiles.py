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
    """A quantile of numbers of which many are equal."""

    def __init__(self, quantile: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.quantile = nn.Linear(6, 12), quantile

    def forward(self, x: Tensor) -> Tensor:
        running = torch.cummax(self.before(x), -1).values
        return self.quantile(running.cos().cummax(1).values)


class AllOf(nn.Module):
    """Each of the quantiles, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({name: Quantile(quantile) for name, quantile in QUANTILES.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([quantile(x).flatten() for quantile in self.of.values()])


@pytest.mark.smoke
def test_bits_of_eager() -> None:
    torch.manual_seed(0)
    plain = AllOf()
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (torch.randn(5, 9, 6),), budget="1GiB", loss_fn=lambda o: o.square().sum(), search_seconds=0.1)
    for _ in range(2):
        x = torch.randn(5, 9, 6)
        for model in (plain, fitted):
            model.zero_grad()
            model(x).square().sum().backward()
        for (name, p), q in zip(plain.named_parameters(), fitted.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and same_bits(p.grad, q.grad), name
