"""A learned number that fills the places of a mask has eager's gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.bits import same_bits


class Filled(nn.Module):
    def __init__(self, learns: str) -> None:
        super().__init__()
        self.layer, self.learns = nn.Linear(16, 16), learns
        self.token = nn.Parameter(torch.tensor(0.3), requires_grad=learns != "layer")
        self.layer.requires_grad_(learns != "token")

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h.masked_fill(x > 0.2, self.token).sin() + h[0].masked_fill(x[:3] > 0, self.token).sum()


@pytest.mark.smoke
@pytest.mark.parametrize("learns", ["both", "token", "layer"])
def test_bits_of_eager(learns: str) -> None:
    torch.manual_seed(0)
    plain, x = Filled(learns), torch.randn(33, 16)
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda o: o.square().sum(), search_seconds=0.1)
    for model in (plain, fitted):
        model(x).square().sum().backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is q.grad
        else:
            assert same_bits(p.grad, q.grad)
