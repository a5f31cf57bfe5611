"""Backward passes round as they do where the loop runs them: outside of the autocast region, or inside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.bits import same_bits


class PartlyInFull(nn.Module):
    """Layers of which some leave the region, as norms, rotary embeddings and routers of libraries do."""

    def __init__(self, *, own_region: bool = False) -> None:
        super().__init__()
        self.first, self.full, self.last = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.own_region = own_region

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.own_region or torch.is_autocast_enabled("cpu")):
            h = torch.tanh(self.first(x))
            with torch.autocast("cpu", enabled=False):
                h = self.full(h.float())
                h = h @ h.T @ h
            return self.last(h)


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def step(model: nn.Module, x: Tensor, *, region: bool, inside: bool) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=region):
        loss = square(model(x))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(plain: nn.Module, fitted: nn.Module, x: Tensor, **how: bool) -> bool:
    return all(map(same_bits, step(plain, x, **how), step(fitted, x, **how)))


@pytest.mark.smoke
@pytest.mark.parametrize("own_region", [False, True])
def test_backward_after_the_region(own_region: bool, told: list[str]) -> None:
    torch.manual_seed(1)
    plain, x = PartlyInFull(own_region=own_region), torch.randn(30, 16)
    fitted = copy.deepcopy(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not own_region):
        memfit.fit(fitted, (x,), budget="1GiB", loss_fn=square)
    assert same(plain, fitted, x, region=not own_region, inside=False)
    assert not told


def test_backward_inside_the_region_is_told_once_and_planned_for(told: list[str]) -> None:
    torch.manual_seed(1)
    plain, x = PartlyInFull(), torch.randn(30, 16)
    fitted = copy.deepcopy(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memfit.fit(fitted, (x,), budget="1GiB", loss_fn=square)
    for _ in range(3):
        assert same(plain, fitted, x, region=True, inside=True)
        assert len(told) == 1 and "inside an autocast region" in told[0] and "with the same bits" in told[0]


def test_a_loop_that_goes_another_way_later_is_told(told: list[str]) -> None:
    torch.manual_seed(1)
    plain, x = PartlyInFull(), torch.randn(30, 16)
    fitted = copy.deepcopy(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memfit.fit(fitted, (x,), budget="1GiB", loss_fn=square)
    assert same(plain, fitted, x, region=True, inside=False)
    assert not same(plain, fitted, x, region=True, inside=True)  # what is told, or there is nothing to tell
    assert len(told) == 1 and "may be rounded otherwise" in told[0]
    assert same(plain, fitted, x, region=True, inside=True)
    step(fitted, x, region=True, inside=False)
    assert len(told) == 2 and "outside of the autocast region" in told[1]
