"""The micro-batch of an effective batch: divisors, by prediction, with the gradients of earlier micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.api import EffectiveBatch
from memfit.cli import main


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 64, 96),)


def found(budget: int, samples: int = 24) -> EffectiveBatch:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    return memfit.effective_batch(model, inputs, samples=samples, budget=budget, optimizer=optimizer)


@pytest.mark.smoke
def test_a_divisor_within_the_budget_takes_the_least_time() -> None:
    result = found(6 * 2**20)
    assert result.micro_batch * result.accumulation_steps == 24
    assert all(way.batch * way.accumulation_steps == 24 for way in result.ways)
    fitting = [way for way in result.ways if way.seconds is not None]
    assert result.predicted_seconds == min(way.seconds for way in fitting if way.seconds is not None)
    assert all(way.peak_bytes is not None and way.peak_bytes <= result.budget_bytes for way in fitting)
    assert max(way.plain_peak_bytes for way in result.ways) > result.budget_bytes
    assert str(result.micro_batch) in str(result)


def test_predictions_are_those_of_plans_with_gradients_of_earlier_micro_batches() -> None:
    result = found(6 * 2**20)
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    (way,) = [way for way in result.ways if way.batch == result.micro_batch]
    assert way.accumulation_steps > 1
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan = memfit.plan(model, inputs(way.batch), budget=result.budget_bytes, optimizer=optimizer)
    assert plan.predicted.plain_peak_bytes == way.plain_peak_bytes
    assert plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= result.budget_bytes


def test_all_at_once_needs_no_room_for_earlier_gradients() -> None:
    result = found(2**33)
    *_, half, whole = result.ways
    gradient_bytes = sum(p.nbytes for p in net().parameters())
    model = net()
    estimate = memfit.estimate(model, inputs(24), optimizer=torch.optim.Adam(model.parameters()))
    assert whole.plain_peak_bytes == pytest.approx(estimate.peak, rel=0.2)  # interpolated, unless it is the fastest
    assert half.plain_peak_bytes > whole.plain_peak_bytes / 2 + gradient_bytes / 2


def test_what_cannot_be() -> None:
    with pytest.raises(memfit.BudgetError) as error:
        found(2**20)
    assert error.value.least_bytes > 2**20
    with pytest.raises(memfit.SpecError, match="at least one sample"):
        found(2**30, samples=0)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    spec = "hf:gpt2?n_layer=2&n_embd=64&n_head=2&vocab_size=500"
    command = ["max-batch", spec, "--shape", "32", "--budget", "8MiB", "--effective-batch", "12", "--json", str(path)]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "for 12 samples" in told and "the fastest" in told
    result = json.loads(path.read_text())
    assert result["micro_batch"] * result["accumulation_steps"] == 12
    assert main([*command, "--strategy", "sqrt"]) == 2
