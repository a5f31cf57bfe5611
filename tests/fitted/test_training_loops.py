"""Several forward passes before a backward pass share the budget, or take as little as they can and say how much."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.allocation_tracker import LiveBytes
from memfit.units import parse_bytes

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
PASSES = 2


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 4))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(model: nn.Module) -> None:
    model.zero_grad()
    losses = [square(model(X + number)) for number in range(PASSES)]
    torch.stack(losses).sum().backward()


def step_bytes(model: nn.Module) -> int:
    """Measured: what a step makes, beside the parameters."""
    with LiveBytes() as counter:
        step(model)
    return counter.peak


def fitted(budget: int) -> nn.Module:
    model = encoder()
    memfit.fit(model, (X,), budget=budget, loss_fn=square, search_seconds=0.05)
    for _ in range(2):
        step(model)
    return model


@functools.cache
def least_bytes() -> int:
    """What one pass needs."""
    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(encoder(), (X,), budget=1, loss_fn=square, search_seconds=0.05)
    return least.value.least_bytes


def test_passes_that_do_not_fit_together_run_with_the_least_that_is_told(told: list[str]) -> None:
    """The budget is what one pass needs, with which no two fit."""
    plain = encoder()
    static = sum(p.nbytes for p in plain.parameters()) + X.nbytes
    one = least_bytes()
    model = fitted(one)
    step(plain)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    (text,) = [text for text in told if "does not fit" in text]
    found = re.search(r"give it about ([\d.]+ \w+)", text)
    assert found is not None
    about = parse_bytes(found[1].replace(" ", ""))
    assert one < about
    assert static + step_bytes(model) <= 1.01 * about
    told.clear()
    roomy = fitted(int(1.02 * about))
    assert not [text for text in told if "does not fit" in text]
    assert static + step_bytes(roomy) <= 1.02 * about
    assert about < 0.8 * (static + step_bytes(plain))


def test_passes_of_other_sizes_run_with_the_least_too(told: list[str]) -> None:
    plain = encoder()
    model = copy.deepcopy(plain)
    memfit.fit(model, (X,), budget=int(1.02 * least_bytes()), loss_fn=square, search_seconds=0.05)

    def both(of: nn.Module) -> None:
        of.zero_grad()
        (square(of(X)) + square(of(X[:200]))).backward()

    peaks = []
    for of in (plain, model, model, model):
        with LiveBytes() as counter:
            both(of)
        peaks.append(counter.peak)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert peaks[-1] < 0.6 * peaks[0]
    assert [text for text in told if "the least that works for each" in text]


def test_what_the_loss_of_each_pass_saves_counts() -> None:
    """The loss of the first pass is there while the second pass runs."""

    def saving(output: torch.Tensor) -> torch.Tensor:
        return output.sigmoid().tanh().exp().sigmoid().mean()

    def step_of(model: nn.Module) -> int:
        model.zero_grad()
        with LiveBytes() as counter:
            torch.stack([saving(model(X + number)) for number in range(PASSES)]).sum().backward()
        return counter.peak

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    static = sum(p.nbytes for p in model.parameters()) + X.nbytes
    budget = int(0.95 * (static + step_of(model)))
    memfit.fit(model, (X,), budget=budget, loss_fn=saving, search_seconds=0.05)
    assert static + [step_of(model) for _ in range(3)][-1] <= memfit.plan_of(model).budget_bytes == budget
