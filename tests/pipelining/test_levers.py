"""Stages that swap or run slice by slice: the same gradients, within the budget of each device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memfit
from memfit.pipelining.plan import decode_pipeline, encode_pipeline
from tests.pipelining.models import Case, baseline_step, gradients, tokens_loss
from tests.pipelining.test_memory import TiedHead, cheap, free_peaks, plan
from tests.small_disk import make_small_disk


def assert_trains_within(pipe: memfit.Pipeline, case: Case, expected: dict[str, torch.Tensor], budget: int) -> None:
    assert max(pipe.plan.measured_peak_bytes) <= budget
    for _ in range(2):
        case.model.zero_grad()
        pipe.step(*case.args, target=case.target)
        for name, parameter in case.model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_swap(schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several micro-batches are in flight, each with a place of its own on the disk."""
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    make_small_disk(monkeypatch, tmp_path / "cache")
    torch.manual_seed(1)
    case = cheap(512)
    baseline_step(case)
    expected = gradients(case.model)
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": schedule}
    budget = int((0.9 if schedule == "zero-bubble" else 0.7) * max(free_peaks(cheap, **options)))
    pipe = plan(case, budget_per_device=budget, tiers="disk", **options)
    assert any(stage.program.swapped() for stage in pipe.plan.stages)
    assert_trains_within(pipe, case, expected, budget)


def test_a_stage_that_fits_in_no_other_way_runs_slice_by_slice() -> None:
    """A large vocabulary: the widest ops are far above what else there is."""
    torch.manual_seed(1)
    model = TiedHead(vocabulary=1500, width=32).double()
    x, y = torch.randint(1500, (2, 8, 64))
    case = Case(model=model, args=(x,), target=y, loss_fn=tokens_loss)
    baseline_step(case)
    expected = gradients(case.model)
    options = {"num_stages": 1, "num_microbatches": 2, "schedule": "1f1b"}
    free = plan(case, prove=False, **options).plan
    budget = int(0.6 * max(free.peak_bytes))
    pipe = plan(case, budget_per_device=budget, levers="all", **options)
    assert pipe.plan.stages[-1].grid
    assert decode_pipeline(encode_pipeline(pipe.plan)) == pipe.plan
    assert_trains_within(pipe, case, expected, budget)
