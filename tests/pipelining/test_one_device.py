"""All stages take turns on one device, and keep one budget together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memfit.errors import BudgetError, SpecError
from memfit.pipelining.config import Found, Question
from memfit.pipelining.partition.forward_graph import capture_forward, flatten_inputs
from memfit.pipelining.search import search
from memfit.pipelining.search.stage_planner import StagePlanner
from memfit.planner.pipeline.memory_split import DoesNotFit
from memfit.planner.pipeline.schedule import Schedule
from tests.pipelining.models import Case, baseline_step, gradients
from tests.pipelining.test_memory import deep, deeper, plan, wide


@pytest.mark.parametrize(
    ("make", "batch", "stages", "microbatches", "options"),
    [
        (deeper, 512, 3, 1, {}),
        (wide, 16, 3, 4, {}),
        (deeper, 512, 4, 4, {"checkpoint": "always"}),
        (deep, 512, 2, 3, {"schedule": "gpipe", "checkpoint": "except_last"}),
    ],
)
def test_all_stages_together_take_what_is_predicted(
    make: Callable[[int], Case], batch: int, stages: int, microbatches: int, options: dict[str, str]
) -> None:
    """A tensor that a stage keeps and the next one received counts once; one that waits for the next stage counts."""
    torch.manual_seed(0)
    made = plan(make(batch), num_stages=stages, num_microbatches=microbatches, one_device=True, **options).plan
    assert len(made.schedule.orders) == 1 and len(made.stages) == stages
    (predicted,), (measured,) = made.peak_bytes, made.measured_peak_bytes
    assert 0.99 * predicted <= measured <= 1.01 * predicted


@pytest.mark.parametrize(("microbatches", "share"), [(1, 0.75), (4, 0.7)])
def test_the_budget_is_that_of_all_stages_and_gradients_stay(microbatches: int, share: float) -> None:
    torch.manual_seed(1)
    case = deeper(512)
    baseline_step(case)
    expected = gradients(case.model)
    options = {"num_stages": 3, "num_microbatches": microbatches, "one_device": True}
    free = plan(case, prove=False, **options).plan
    budget = int(share * free.peak_bytes[0])
    pipe = plan(case, budget_per_device=budget, **options)
    assert pipe.plan.budget_bytes == (budget,)
    assert 0.85 * budget < pipe.plan.measured_peak_bytes[0] <= budget
    again = sum(stage.recompute_seconds for stage in pipe.plan.stages)
    assert 0 < again < 0.9 * sum(stage.forward_seconds for stage in pipe.plan.stages)
    pipe.step(*case.args, target=case.target)
    for name, parameter in case.model.named_parameters():
        if microbatches == 1:
            assert torch.equal(parameter.grad, expected[name])
        else:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(
    ("share", "options"),
    [(0.85, {"schedule": "1f1b", "one_device": True}), (0.8, {"schedule": "interleaved-1f1b"})],
)
def test_no_device_is_planned_beyond_its_budget(share: float, options: dict[str, object]) -> None:
    """Stages that keep everything of the last micro-batch do so one beside the other."""
    case = deep(512)
    options = {"num_stages": 2, "num_microbatches": 4, "prove": False, **options}
    budget = int(share * max(plan(case, **options).plan.peak_bytes))
    made = plan(case, budget_per_device=budget, **options).plan
    assert max(made.peak_bytes) <= budget
    assert any(stage.recompute_seconds for stage in made.stages)


def test_what_does_not_fit_is_told() -> None:
    case = deep(128)
    options = {"num_stages": 2, "num_microbatches": 2, "one_device": True}
    with pytest.raises(BudgetError, match=r"bytes\) work$") as told:
        plan(case, budget_per_device="150KiB", **options)
    made = plan(case, budget_per_device=told.value.least_bytes, **options).plan
    assert made.measured_peak_bytes[0] <= told.value.least_bytes
    with pytest.raises(SpecError, match="one budget for each device"):
        plan(case, budget_per_device=["1GiB", "1GiB"], **options)


def test_where_least_is_held_does_not_do_even_stages_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts that hold least if all is kept may leave a stage too wide to be run again."""
    case = deeper(64)
    question = Question(num_devices=3, num_microbatches=2, one_device=True, budget_bytes=(10**9,))
    forward = capture_forward(case.model, case.args, {}, case.target, case.loss_fn)
    leaves, _ = flatten_inputs(case.args, {}, case.target)
    even: list[list[int]] = []
    monkeypatch.setattr(search, "cuts_holding_least", lambda *rest: (even.append(rest[3]), [1, 2])[1])
    planned = StagePlanner.plan

    def plan_unless_narrow(self: StagePlanner, schedule: Schedule, places: list[int]) -> Found:
        if places == [1, 2]:
            raise DoesNotFit(0, BudgetError("too wide", budget_bytes=1, least_bytes=2))
        return planned(self, schedule, places)

    monkeypatch.setattr(StagePlanner, "plan", plan_unless_narrow)
    found = search.search(forward, leaves, question, torch.device("cpu"))
    assert list(found.cuts) != [1, 2] and len(even) == 1
