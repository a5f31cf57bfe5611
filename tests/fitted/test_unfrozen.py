"""Where gradients of what is unfrozen in the middle of training do not fit, training goes on, and says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit
from benchmarks.notices import notices
from memfit.errors import BudgetError


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(64, 4)).train()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def only_last(model: nn.Sequential) -> nn.Sequential:
    model.requires_grad_(False)[-1].requires_grad_(True)
    return model


@pytest.mark.smoke
def test_parameters_that_are_unfrozen_run_over_the_budget_with_a_notice() -> None:
    model, x = only_last(stack()), torch.randn(16, 64)
    plain = copy.deepcopy(model)
    peak = memfit.estimate(model, (x,), loss_fn=loss_of).peak
    memfit.fit(model, (x,), budget=peak + 2048, loss_fn=loss_of, search_seconds=0.5)
    with notices() as told:
        for trained in (False, True, True):
            for each in (model, plain):
                if trained:
                    each.requires_grad_(True)
                each.zero_grad()
                loss_of(each(x)).backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    assert "takes more than its budget" in " ".join(told)


def test_the_first_plan_of_all_is_refused_where_nothing_fits() -> None:
    model, x = stack(), torch.randn(16, 64)
    with pytest.raises(BudgetError):
        memfit.fit(model, (x,), budget=1024, loss_fn=loss_of, search_seconds=0.5)
