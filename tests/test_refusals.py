"""A budget that is too small: the error says for whom, from where on it works, what binds there and what else to do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.compiler.correction import lowered
from memfit.compiler.driver import Step, plan_profiled
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.refusals import advised, refusal, refused
from memfit.units import format_bytes

PASSES = itertools.count()
X = torch.randn(1024, 64)


class Layers(nn.Module):
    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@torch.compiler.disable
def growing(x: torch.Tensor) -> torch.Tensor:
    """Takes 1.75 MiB that no planner knows of, and 128 KiB more in each pass, which no snapshot can take back."""
    torch.ones((14 + next(PASSES)) << 15).sum()
    return x


@torch.compiler.disable
def growing_once(x: torch.Tensor) -> torch.Tensor:
    """Takes 1 MiB that no planner knows of, and 2 MiB from the pass on that measures a second plan."""
    torch.ones((1 << 18) + (next(PASSES) > 4) * (1 << 18)).sum()
    return x


class Growing(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = growing) -> None:
        super().__init__()
        self.first, self.last, self.between = Layers(8), Layers(4), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


def test_an_error_about_another_budget_keeps_its_facts() -> None:
    first = refusal(budget_bytes=-7, least_bytes=2 << 20, binding="op", subject="order of strategy 's'", advice="do it")
    error = refused(advised(first, "do that"), budget_bytes=1 << 20, missed_bytes=1 << 20)
    assert (error.budget_bytes, error.least_bytes, error.binding) == (1 << 20, 3 << 20, "op")
    assert str(error) == (
        f"no order of strategy 's' fits 1.0 MiB; the least budget that works is 3.0 MiB ({3 << 20} bytes), set by op; "
        "measured peaks are 1.0 MiB above predicted ones here; do it; do that"
    )


@pytest.fixture(scope="module")
def captured() -> tuple[nn.Module, Step]:
    """A model, captured and profiled."""
    model = Layers(3)
    return model, capture_and_profile(model, (X,), {}, Request(budget=1))


@pytest.mark.parametrize("name", ["rotor", "knapsack", "milp", "mu-two", "every-block", "sqrt"])
def test_a_strategy_that_does_not_fit_says_from_where_on_what_binds_and_what_else_may(
    name: str, captured: tuple[nn.Module, Step]
) -> None:
    model, step = captured
    request = Request(budget="1MiB", strategy=name, prove=False, search_seconds=0.1)
    with pytest.raises(memfit.BudgetError) as caught:
        plan_profiled(model, (X,), {}, step, request, 1 << 20)
    error = caught.value
    told = str(error)
    assert told.startswith(f"no {error.subject} fits 1.0 MiB; the least budget that works is ") and repr(name) in told
    assert f"{format_bytes(error.least_bytes)} ({error.least_bytes} bytes), set by layers." in told
    assert "strategy 'auto'" in error.advice and told.endswith(error.advice)
    plan = plan_profiled(model, (X,), {}, step, request, error.least_bytes)
    assert plan.predicted.peak_bytes <= error.least_bytes


def test_plans_that_take_more_than_their_budget_whenever_they_run() -> None:
    global PASSES
    PASSES = itertools.count()
    model, budget_bytes = Growing(), int(3.9 * (1 << 20))
    request = Request(budget=budget_bytes, strategy="rotor", search_seconds=0.1)
    step = capture_and_profile(model, (X,), {}, request)
    with pytest.raises(memfit.BudgetError) as caught:
        plan_profiled(model, (X,), {}, step, request, budget_bytes)
    error = caught.value
    assert error.budget_bytes == budget_bytes < error.least_bytes
    assert re.search(r"no plan fits 3\.9 MiB; .*\(\d+ bytes\), set by .* (add)?mm \(", str(error))
    assert "above predicted ones here; 4 plans" in str(error) and str(error.least_bytes) in str(error)


def test_what_two_plans_missed_is_taken_from_the_budget_once() -> None:
    global PASSES
    PASSES = itertools.count()
    model, budget_bytes = Growing(growing_once), 2900 << 10
    request = Request(budget=budget_bytes, strategy="rotor", search_seconds=0.1)
    step = capture_and_profile(model, (X,), {}, request)
    plan = plan_profiled(model, (X,), {}, step, request, budget_bytes)
    assert plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= budget_bytes


def test_what_a_plan_missed_lowers_the_next_ones_budget() -> None:
    first = lowered(1000, 1000, measured_bytes=1090, predicted_bytes=990)
    assert first == 900
    assert lowered(first, 1000, measured_bytes=1010, predicted_bytes=895) == 885  # not 785: 115 were missed, not 215
    assert lowered(first, 1000, measured_bytes=1200, predicted_bytes=600) == 400
    assert lowered(first, 1000, measured_bytes=1001, predicted_bytes=900) == 899  # less than before, always


def test_tiles_that_do_not_fit_either_leave_the_error_of_what_takes_the_least() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    with pytest.raises(memfit.BudgetError) as caught:
        memfit.plan(model, (X,), budget="64KiB", levers="all", prove=False, search_seconds=0.1)
    assert caught.value.least_bytes > 64 << 10 and str(caught.value.least_bytes) in str(caught.value)
