"""Searches are limited by counted work: the same plan each time, however busy the machine is."""

from __future__ import annotations

import time

import pytest

from benchmarks.busy import busy
from memfit.errors import SpecError
from memfit.ir.program import baseline_order, program_of
from memfit.planner.effort import Effort, clock_limit, search_limit
from memfit.planner.offload.search import find_program
from memfit.planner.search.min_memory import least_order
from memfit.sim.simulator import simulate
from tests.strategies.builders import residual


def test_work_counts_for_the_search_and_for_the_search_it_is_a_part_of() -> None:
    whole = Effort()
    whole.charge(1.0)
    part = Effort(whole)
    part.charge_ops(40_000)
    part.charge_once("table", 2.0)
    part.charge_once("table", 2.0)
    assert (whole.seconds, part.seconds) == pytest.approx((4.0, 3.0))
    assert part.exceeds(2.9) and not part.exceeds(3.1)


def test_the_clock_ends_a_search_that_takes_far_too_long() -> None:
    effort = Effort()
    assert not effort.exceeds(0.0) and clock_limit(0.0) > 0.5 and clock_limit(10.0) > 40.0
    time.sleep(clock_limit(0.0))
    assert effort.exceeds(0.0) and not effort.exceeds(10.0)


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_the_same_plan_on_a_busy_machine(seconds: float) -> None:
    graph = residual(8)
    least = simulate(graph, program_of(graph, least_order(graph))).peak_bytes
    plain = simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes
    budget = least + (plain - least) // 3
    efforts = [Effort(), Effort()]
    alone = find_program(graph, budget, seconds=seconds, effort=efforts[0])
    with busy():
        beside = find_program(graph, budget, seconds=seconds, effort=efforts[1])
        lowest = simulate(graph, program_of(graph, least_order(graph))).peak_bytes
    assert beside == alone and lowest == least
    assert efforts[0].seconds == efforts[1].seconds > 0


def test_the_environment_limits_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_limit(8.0) == 8.0
    monkeypatch.setenv("MEMFIT_SEARCH_SECONDS", "0.5")
    assert (search_limit(8.0), search_limit(0.1)) == (0.5, 0.1)
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("MEMFIT_SEARCH_SECONDS", wrong)
        with pytest.raises(SpecError, match="MEMFIT_SEARCH_SECONDS"):
            search_limit(8.0)
