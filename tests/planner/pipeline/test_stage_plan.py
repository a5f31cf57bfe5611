"""Stages that hold several micro-batches: what they keep counts for each of them."""

from __future__ import annotations

import pytest

from memfit.errors import BudgetError
from memfit.ir.program import program_of
from memfit.planner.pipeline.stage_plan import Traffic, plan_always, plan_never, plan_stage
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.planner.chains import chain, stage


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_what_is_kept_counts_for_each_that_is_in_flight(in_flight: int) -> None:
    graph = chain(8)
    plan = plan_never(graph, None, Traffic(in_flight=in_flight, received_bytes=3))
    alone = simulate(graph, plan.program).peak_bytes
    assert plan.saved_bytes == 8 * 10 + 3
    assert plan.peak_bytes == alone + (in_flight - 1) * plan.saved_bytes
    assert plan.forward_seconds == pytest.approx(8.0)
    assert plan.backward_seconds == pytest.approx(16.0)


def test_always_keeps_nothing_but_what_was_received() -> None:
    graph = chain(8)
    plan = plan_always(graph, None, Traffic(in_flight=4, received_bytes=3))
    check(graph, plan.program)
    assert plan.saved_bytes == 3
    assert plan.timeline.recompute_seconds == pytest.approx(8.0)


@pytest.mark.parametrize("limit", [60, 30, 0])
def test_a_plan_keeps_no_more_than_it_may(limit: int) -> None:
    graph = stage(12, received_bytes=3)
    traffic = Traffic(in_flight=2, received_bytes=3)
    plan = plan_stage(graph, 150, traffic, saved_limit_bytes=limit, seconds=0.1)
    check(graph, plan.program)
    assert plan.timeline.peak_bytes <= 150
    assert plan.saved_bytes <= limit + 3
    assert plan.peak_bytes == plan.timeline.peak_bytes + plan.saved_bytes
    assert plan.timeline.recompute_seconds >= (120 - limit) / 10 - 1  # the last result need not be kept for the loss


def test_room_for_everything_runs_nothing_again() -> None:
    graph = chain(6)
    traffic = Traffic(in_flight=3, received_bytes=5)
    never = plan_never(graph, None, traffic)
    plan = plan_stage(graph, never.timeline.peak_bytes, traffic, saved_limit_bytes=never.saved_bytes)
    assert plan.timeline.recompute_seconds == 0
    assert plan.program.order() == program_of(graph, range(len(graph.ops))).order()


def test_too_little_is_told() -> None:
    with pytest.raises(BudgetError):
        plan_stage(chain(6), 15, Traffic(in_flight=3, received_bytes=0), saved_limit_bytes=0, seconds=0.1)
