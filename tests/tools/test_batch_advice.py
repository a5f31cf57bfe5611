"""A step that does not fit is told with micro-batches that do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))

    def forward(self, x: Tensor, scale: Tensor, names: list[str] | None = None) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) * scale).square().mean(), "names": torch.ones(len(names or ()))}


def refused(rows: int, budget: int, loss_fn: Callable[..., Tensor] | None = None) -> str:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(rows, 64)
    memfit.fit(model, budget=budget, loss_fn=loss_fn, search_seconds=0.1)
    with pytest.raises(memfit.BudgetError) as caught:
        model(x, scale=torch.tensor(2.0), names=["a"])
    assert caught.value.least_bytes > budget and caught.value.advice in str(caught.value)
    return caught.value.advice


@pytest.mark.parametrize(("budget", "count"), [(900_000, 2), (700_000, 4)])
def test_micro_batches_that_fit_are_advised(budget: int, count: int) -> None:
    told = refused(1024, budget)
    samples = 1024 // count
    assert f"{count} micro-batches of {samples} samples, with their gradients added up, fit in the place of" in told
    torch.manual_seed(0)
    model, x = Net(), torch.randn(1024, 64)
    memfit.fit(model, budget=budget, search_seconds=0.1)
    for part in x.split(samples):
        model(part, scale=torch.tensor(2.0), names=["a"])["loss"].backward()
        assert memfit.plan_of(model).predicted.peak_bytes <= budget


@pytest.mark.parametrize(("rows", "budget"), [(1, 1000), (1024, 60_000)], ids=["one sample", "too much without any"])
def test_there_may_be_no_way(rows: int, budget: int) -> None:
    assert "micro-batches" not in refused(rows, budget)


def test_a_loss_of_any_batch_does_not_hinder() -> None:
    assert "2 micro-batches of 512 samples" in refused(1024, 900_000, lambda output: output["loss"] * 2)


def test_a_loss_bound_to_this_batch_leaves_the_error_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x, y = torch.randn(999, 64), torch.ones(999, 64)
    memfit.fit(model, budget=300_000, loss_fn=lambda output: (output - y).square().sum(), search_seconds=0.1)
    with pytest.raises(memfit.BudgetError) as caught:
        model(x)
    assert "micro-batches" not in str(caught.value)
