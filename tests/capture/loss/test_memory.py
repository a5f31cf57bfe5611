"""The memory of losses, to the byte: what a plan predicts is what its proving run measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit

_TARGET = torch.rand(256, 64)


class _Keeping:
    """A loss that keeps its last output."""

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        self.last = output.detach()
        return output.square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o: F.mse_loss(o, _TARGET),
        lambda o: F.smooth_l1_loss(o, _TARGET, reduction="sum"),
        lambda o: F.binary_cross_entropy(o.sigmoid(), _TARGET),
        lambda o: o.square().mean(),
    ],
)
def test_what_a_loss_holds_is_predicted_and_the_least_budget_works(
    loss_fn: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 64))
    data = torch.randn(256, 32)
    plan = memfit.plan(model, (data,), budget="1GiB", loss_fn=loss_fn, search_seconds=0.1)
    assert plan.measured_peak_bytes == plan.predicted.peak_bytes
    with pytest.raises(memfit.BudgetError) as refused:
        memfit.plan(model, (data,), budget=plan.predicted.peak_bytes // 2, loss_fn=loss_fn, search_seconds=0.1)
    least = refused.value.least_bytes
    assert memfit.plan(model, (data,), budget=least, loss_fn=loss_fn, search_seconds=0.1).fits


def test_an_output_that_a_loss_keeps_is_there_in_the_next_step() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(256, 32)
    bare = memfit.plan(model, (data,), budget="1GiB", loss_fn=lambda o: o.square().mean(), prove=False)
    keeping = memfit.plan(model, (data,), budget="1GiB", loss_fn=_Keeping(), prove=False)
    assert keeping.predicted.peak_bytes - bare.predicted.peak_bytes == 256 * 64 * 4
