"""The budget counts outputs that the loop still holds when the next forward pass begins."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.allocation_tracker import LiveBytes


class Features(nn.Module):
    """Returns features as well, which are large, so that the forward pass takes the most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.into(x))
        for _ in range(3):
            y = torch.sin(y)
        return self.out(y), torch.cat([y.detach()] * 3, 1).exp() + 1


def square(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean()


def made(*, requires_grad: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Features(), torch.randn(512, 16, requires_grad=requires_grad)


def loop_bytes(model: nn.Module, x: Tensor, *, steps: int, deletes: bool) -> list[int]:
    """The measured peak of each step of a loop, in which `x` is replaced by a copy in each step."""
    outputs: tuple[Tensor, ...] = ()
    peaks = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        inputs = x.detach().clone().requires_grad_(x.requires_grad)
        held = sum(t.nbytes for t in outputs) + (2 * x.nbytes if outputs and x.requires_grad else 0)
        with LiveBytes() as counter:
            outputs = model(inputs)
            forward_peak = counter.peak + held
            square(outputs).backward()
        peaks.append(max(forward_peak, counter.peak) + sum(p.nbytes for p in model.parameters()) + inputs.nbytes)
        if deletes:
            outputs = ()
    return peaks


@functools.cache
def least_bytes(*, requires_grad: bool = False) -> int:
    model, x = made(requires_grad=requires_grad)
    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(model, (x,), budget=1, loss_fn=square, search_seconds=0.05)
    return least.value.least_bytes


@pytest.mark.parametrize("requires_grad", [False, True])
def test_outputs_of_the_previous_step_count(requires_grad: bool, told: list[str]) -> None:
    model, x = made(requires_grad=requires_grad)
    budget = least_bytes(requires_grad=requires_grad) + 2_000_000
    memfit.fit(model, (x,), budget=budget, loss_fn=square, search_seconds=0.05)
    _, _, *later = loop_bytes(model, x, steps=4, deletes=False)
    assert max(later) <= budget == memfit.plan_of(model).budget_bytes
    held = "1.6 MiB" if requires_grad else "1.5 MiB"  # an output refers to the inputs that require a gradient
    assert sum(f"still holds {held} of outputs" in text for text in told) == 1


def test_outputs_that_are_deleted_do_not(told: list[str]) -> None:
    model, x = made()
    budget = least_bytes() + 2_000_000
    memfit.fit(model, (x,), budget=budget, loss_fn=square, search_seconds=0.05)
    plan = memfit.plan_of(model)
    assert max(loop_bytes(model, x, steps=4, deletes=True)) <= budget
    assert memfit.plan_of(model) is plan and told == []


def test_where_they_do_not_fit_it_is_told_and_training_goes_on(told: list[str]) -> None:
    model, x = made()
    budget = least_bytes()
    memfit.fit(model, (x,), budget=budget, loss_fn=square, search_seconds=0.05)
    loop_bytes(model, x, steps=3, deletes=False)
    assert ["still holds" in text or "takes more than its budget" in text for text in told] == [True, True]
    assert memfit.plan_of(model).budget_bytes > budget
