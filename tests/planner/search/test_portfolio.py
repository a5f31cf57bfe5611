"""The automatic planner: valid, within the budget, optimal where the optimum is known, never below the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from memfit import strategies
from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.program import baseline_order, program_of
from memfit.planner.analysis.explain import decisions
from memfit.planner.bounds.lower_bound import relaxed_bound, widest_op_bytes
from memfit.planner.search.min_memory import least_order
from memfit.planner.search.portfolio import find_order
from memfit.sim.simulator import Timeline, simulate
from memfit.sim.verifier import check
from tests.ir.random_graphs import step_graphs
from tests.planner.chains import chain
from tests.strategies.builders import chain as even_chain


def judged(graph: StepGraph, order: list[int] | tuple[int, ...]) -> Timeline:
    program = program_of(graph, order)
    check(graph, program)
    return simulate(graph, program)


@pytest.mark.parametrize("budget", (40, 50, 70, 100))
def test_chain_is_planned_optimally(budget: int) -> None:
    graph = chain(8)
    found = find_order(graph, budget, seconds=1.0)
    best = judged(graph, strategies.find("milp")(graph, budget))
    assert judged(graph, found.order).peak_bytes <= budget
    assert found.timeline.recompute_seconds == pytest.approx(best.recompute_seconds)
    assert found.bound_seconds <= found.timeline.recompute_seconds + 1e-9


def test_more_memory_is_never_slower() -> None:
    graph = chain(16)
    times = [find_order(graph, budget, seconds=0.2).timeline.recompute_seconds for budget in range(60, 201, 20)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


def test_what_cannot_fit_says_what_would() -> None:
    graph = chain(8)
    with pytest.raises(BudgetError) as caught:
        find_order(graph, 20, seconds=0.2)
    assert "least budget" in str(caught.value)
    found = find_order(graph, caught.value.least_bytes, seconds=0.2)
    assert found.timeline.peak_bytes <= caught.value.least_bytes


def test_a_plan_explains_itself() -> None:
    graph = chain(8)
    found = find_order(graph, 60, seconds=1.0)
    rows = decisions(graph, program_of(graph, found.order), found.timeline)
    assert sum(row.extra_seconds for row in rows) == pytest.approx(found.timeline.recompute_seconds)
    assert all(row.reason for row in rows)


@pytest.mark.parametrize(("share", "is_very_far"), [(0.25, False), (0.2, True)])
def test_a_large_step_gets_a_second_start_where_the_first_is_very_far(
    share: float, is_very_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.planner.search.portfolio.LARGE_STEP", 10)
    graph = even_chain([8] * 40)
    budget = int(judged(graph, baseline_order(graph)).peak_bytes * share)
    names: list[str] = []
    # The first start takes more work than the usual search of a large step, and less than that of one that is very far.
    find_order(graph, budget, seconds=0.5, progress=names.append)
    starts = [name for name in names if not name.startswith("variations")]
    assert (len(starts) > 1) == is_very_far


def test_a_search_tells_the_best_program_so_far() -> None:
    graph = even_chain([8] * 40)
    budget = int(judged(graph, baseline_order(graph)).peak_bytes * 0.2)
    told: list[str] = []
    found = find_order(graph, budget, seconds=0.5, progress=told.append)
    first, *later = told
    assert "best so far" not in first
    overheads = [float(line.partition("best so far ")[2].partition("%")[0]) for line in later]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] >= 100 * found.timeline.overhead - 0.1


@settings(max_examples=40)
@given(step_graphs())
def test_random_steps(graph: StepGraph) -> None:
    plain = judged(graph, baseline_order(graph)).peak_bytes
    for share in (0.9, 0.7):
        budget = int(plain * share)
        if budget <= 0:
            continue
        try:
            found = find_order(graph, budget, seconds=0.1)
        except BudgetError as error:
            assert error.least_bytes > budget
            continue
        timeline = judged(graph, found.order)
        assert timeline.peak_bytes <= budget
        assert timeline.recompute_seconds >= relaxed_bound(graph, budget) - 1e-9


@settings(max_examples=40)
@given(step_graphs())
def test_least_order_is_valid_and_above_the_wall(graph: StepGraph) -> None:
    assert judged(graph, least_order(graph)).peak_bytes >= widest_op_bytes(graph) or any(
        op.in_place_over for op in graph.ops
    )


@settings(max_examples=25)
@given(step_graphs())
def test_milp_is_the_best_there_is(graph: StepGraph) -> None:
    graph = replace(graph, ops=tuple(replace(op, in_place_over=()) for op in graph.ops))
    budget = int(judged(graph, baseline_order(graph)).peak_bytes * 0.8)
    if len(graph.ops) > 40 or budget <= 0:
        return
    try:
        best = judged(graph, strategies.find("milp")(graph, budget))
    except BudgetError:
        return
    assert best.peak_bytes <= budget
    for name in ("auto", "mu-two", "knapsack", "rotor"):
        try:
            other = judged(graph, strategies.find(name)(graph, budget))
        except BudgetError:
            continue
        assert best.recompute_seconds <= other.recompute_seconds + 1e-9
