"""A step is traced once: the plans of a capture begin with the joint graph that it kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import compilation_time_metrics

import memfit

_TRACED = "aot_trace_joint_graph"  # torch times each by this name


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32)) for _ in range(4)]
    return nn.Sequential(*blocks)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def _traced() -> int:
    return len(compilation_time_metrics.get(_TRACED, ()))


def _step(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    _loss(model(inputs)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.smoke
def test_a_step_that_is_fitted_is_traced_once() -> None:
    model, inputs = _model(), torch.randn(256, 32)
    expected = _step(copy.deepcopy(model), inputs)
    peak = memfit.estimate(model, (inputs,), loss_fn=_loss).peak
    before = _traced()
    fitted = memfit.fit(model, (inputs,), budget=int(0.8 * peak), loss_fn=_loss)
    gradients = _step(fitted, inputs)
    assert _traced() == before + 1
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_each_plan_of_a_capture_changes_a_copy() -> None:
    model, inputs = _model(), torch.randn(256, 32)
    expected = _step(copy.deepcopy(model), inputs)
    estimate = memfit.estimate(model, (inputs,), loss_fn=_loss)
    before = _traced()
    with pytest.raises(memfit.BudgetError) as found:
        memfit.fit(model, (inputs,), budget=estimate.least // 2, loss_fn=_loss)
    traced_for_error = _traced() - before
    for budget in (found.value.least_bytes, estimate.peak):
        again = copy.deepcopy(model)
        gradients = _step(memfit.fit(again, (inputs,), budget=budget, loss_fn=_loss), inputs)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert traced_for_error == 1  # the least budget is measured, so the error's plan has run
