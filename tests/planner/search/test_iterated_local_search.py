"""Varied orders are right, within the budget, and find what greedy polishing does not."""

from __future__ import annotations

from itertools import islice

from memfit.ir.program import baseline_order, program_of
from memfit.planner.search.iterated_local_search import Pool, varied
from memfit.planner.search.spill_and_fill import fill, spill
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.planner.chains import chain


def test_the_pool_keeps_the_fastest_once() -> None:
    pool = Pool()
    for seconds in (5.0, 3.0, 3.0, 9.0, 1.0, *range(10, 20)):
        pool.add(seconds, (int(seconds),))
    assert [seconds for seconds, _ in pool.orders] == [1.0, 3.0, 5.0, 9.0, 10, 11, 12, 13]


def test_varied_orders_fit_and_do_not_get_worse() -> None:
    graph, budget = chain(24), 64
    start = spill(graph, baseline_order(graph), budget)
    assert start is not None
    first = fill(graph, start, budget)
    pool = Pool()
    pool.add(simulate(graph, program_of(graph, first)).step_seconds, tuple(first))
    before = pool.orders[0][0]
    for fitting in islice(varied(graph, pool, budget), 60):
        order = fill(graph, fitting, budget)
        program = program_of(graph, order)
        check(graph, program)
        timeline = simulate(graph, program)
        assert timeline.peak_bytes <= budget
        pool.add(timeline.step_seconds, tuple(order))
    assert pool.orders[0][0] < before
