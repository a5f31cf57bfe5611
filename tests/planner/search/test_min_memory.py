"""The search for the least budget does the work that it may do, and lowers the peak with more of it."""

from __future__ import annotations

import pytest

from memfit.ir.program import program_of
from memfit.planner.effort import Effort
from memfit.planner.search.min_memory import least_order
from memfit.sim.simulator import simulate
from tests.planner.chains import chain


@pytest.mark.parametrize(("seconds", "enough_bytes"), [(0.0, 0), (1.0, 0), (0.25, 1)])
def test_it_obeys_the_seconds_it_is_given(seconds: float, enough_bytes: int) -> None:
    graph, effort = chain(200), Effort()
    asked = max(1.0, 4 * seconds if enough_bytes else seconds)
    order = least_order(graph, seconds=seconds, enough_bytes=enough_bytes, effort=effort)
    # A target in flight stops at twice the work, and each of its other starts after one round.
    assert 0.5 * asked < effort.seconds < 2 * asked + 1.5
    assert sorted(set(order)) == list(range(len(graph.ops)))


def test_more_work_finds_less() -> None:
    graph = chain(300)
    short, long = (simulate(graph, program_of(graph, least_order(graph, seconds=s))).peak_bytes for s in (1.0, 2.0))
    assert long < short
