"""The exact strategy: equal to brute force on tiny steps, never slower than any other strategy."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memfit.errors import BudgetError, SpecError
from memfit.ir.graph import Phase, StepGraph
from memfit.ir.program import baseline_order, program_of
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.sim.simulator import Timeline, simulate
from memfit.sim.verifier import check
from memfit.strategies import find, milp
from tests.ir.random_graphs import step_graphs
from tests.strategies.builders import chain, residual, unet

OTHERS = ("sqrt", "every-block", "openai-speed", "openai-memory", "sequential:2", "knapsack", "mu-two", "rotor")


def timeline(graph: StepGraph, order: list[int]) -> Timeline:
    program = program_of(graph, order)
    check(graph, program)
    return simulate(graph, program)


def choices(graph: StepGraph) -> list[tuple[int, int]]:
    """Every op that may run again in every stage."""
    found = []
    for stage in range(1, len(graph.ops)):
        before = graph.ops[stage - 1]
        for index, op in enumerate(graph.ops[:stage]):
            closed = before.phase is Phase.BACKWARD and op.subgraph > before.subgraph
            coming = graph.ops[stage]
            closed = closed or (coming.phase is Phase.BACKWARD and op.subgraph < coming.subgraph)
            if op.phase is Phase.FORWARD and op.recomputable and not closed:
                found.append((stage, index))
    return found


def every_order(graph: StepGraph) -> list[list[int]]:
    """The baseline order first."""
    found = choices(graph)
    orders = []
    for bits in itertools.product([False, True], repeat=len(found)):
        chosen = {choice for choice, bit in zip(found, bits, strict=True) if bit}
        stages = range(len(graph.ops))
        orders.append([i for stage in stages for i in (*(i for i in stages if (stage, i) in chosen), stage)])
    return orders


def is_read(graph: StepGraph, order: list[int]) -> bool:
    """Whether each recomputed result is read before it is recomputed once more: others only cost time and memory."""
    first = {index: place for place, index in reversed([*enumerate(order)])}
    wanted: set[int] = set()
    for place, index in reversed([*enumerate(order)]):
        op = graph.ops[index]
        if place != first[index] and wanted.isdisjoint(op.writes):
            return False
        wanted = wanted.difference(op.writes) | {*op.reads}
    return True


def in_stages(graph: StepGraph, order: list[int]) -> bool:
    """Whether between two first runs each op runs at most once and in order, which is what the program looks at."""
    seen: set[int] = set()
    last = -1
    for index in order:
        if index not in seen:
            seen.add(index)
            last = -1
        elif index <= last:
            return False
        else:
            last = index
    return True


@given(step_graphs(max_forward=2, exact=True), st.integers(0, 5))
@settings(max_examples=30)
def test_equals_brute_force(graph: StepGraph, rank: int) -> None:
    assume(len(choices(graph)) <= 9)
    outcomes = [timeline(graph, order) for order in every_order(graph)]
    peaks = sorted({outcome.peak_bytes for outcome in outcomes})
    budget = peaks[min(rank, len(peaks) - 1)]
    fastest = min(outcome.recompute_seconds for outcome in outcomes if outcome.peak_bytes <= budget)
    found = timeline(graph, milp.order(graph, budget))
    assert found.peak_bytes <= budget
    assert found.recompute_seconds == pytest.approx(fastest)
    with pytest.raises(BudgetError) as raised:
        milp.order(graph, peaks[0] - 1)
    assert raised.value.least_bytes == peaks[0]


@pytest.mark.parametrize("graph", [chain([8, 4, 8]), chain([2, 8, 8], seconds=[3, 1, 2])], ids=["narrow", "wide"])
def test_equals_brute_force_where_something_must_run_again(graph: StepGraph) -> None:
    outcomes = [timeline(graph, order) for order in every_order(graph) if is_read(graph, order)]  # of 32768 orders 272
    budgets = sorted({outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes <= outcomes[0].peak_bytes})
    assert len(outcomes) == 272 and len(budgets) > 1
    for budget in budgets:
        fastest = min(outcome.recompute_seconds for outcome in outcomes if outcome.peak_bytes <= budget)
        assert timeline(graph, milp.order(graph, budget)).recompute_seconds == pytest.approx(fastest)


HAND_BUILT = [chain([8] * 8), chain([32, 16, 4, 16, 32, 4, 8]), residual(1), unet(2)]


@pytest.mark.parametrize("graph", HAND_BUILT, ids=["even", "uneven", "residual", "unet"])
@pytest.mark.parametrize("other", OTHERS)
def test_no_strategy_is_faster_at_the_same_budget(graph: StepGraph, other: str) -> None:
    plain = timeline(graph, baseline_order(graph)).peak_bytes
    for budget in {plain * percent // 100 for percent in (100, 85, 70, 60)}:
        try:
            order = find(other)(graph, budget)
        except BudgetError:
            continue
        known = timeline(graph, order)
        if in_stages(graph, order):
            optimum = timeline(graph, milp.order(graph, known.peak_bytes))
            assert optimum.recompute_seconds <= known.recompute_seconds + 1e-6


@given(step_graphs(max_forward=4), st.sampled_from(OTHERS), st.floats(0.5, 1))
@settings(max_examples=30)
def test_no_strategy_is_faster_on_random_steps(graph: StepGraph, other: str, share: float) -> None:
    plain = timeline(graph, baseline_order(graph)).peak_bytes
    try:
        order = find(other)(graph, int(share * plain))
    except BudgetError:
        return
    known = timeline(graph, order)
    assume(in_stages(graph, order))
    optimum = timeline(graph, milp.order(graph, known.peak_bytes))
    assert optimum.peak_bytes <= known.peak_bytes
    assert optimum.recompute_seconds <= known.recompute_seconds + 1e-6


@pytest.mark.parametrize("graph", HAND_BUILT, ids=["even", "uneven", "residual", "unet"])
def test_lies_between_the_relaxed_bound_and_a_step_run_twice(graph: StepGraph) -> None:
    with pytest.raises(BudgetError) as raised:
        milp.order(graph, 1)
    budget = (raised.value.least_bytes + timeline(graph, baseline_order(graph)).peak_bytes) // 2
    found = timeline(graph, milp.order(graph, budget))
    assert relaxed_bound(graph, budget) - 1e-6 <= found.recompute_seconds
    assert 0 < found.recompute_seconds <= sum(op.seconds for op in graph.ops[: graph.loss_index])


def test_large_steps_are_refused() -> None:
    graph = chain([8] * 40)
    with pytest.raises(SpecError, match=r"at most 60 ops \(ops: 81\); use 'rotor' or 'auto'"):
        milp.order(graph, 100)


def test_without_a_budget_nothing_runs_again() -> None:
    graph = residual(2)
    assert milp.order(graph, None) == baseline_order(graph)
