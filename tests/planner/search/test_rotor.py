"""Rotor: within the budget, above the bound, no slower with more memory, and low where memory is short."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.program import plain_order, program_of
from memfit.planner.analysis.chain import cut_chain
from memfit.planner.bounds.lower_bound import relaxed_bound, widest_op_bytes
from memfit.planner.search import rotor
from memfit.planner.search.rotor.options import options_of
from memfit.planner.search.rotor.priced_options import site_of
from memfit.planner.search.rotor.shape import Shape, cone, profile, shape_of
from memfit.planner.search.rotor.table import fill
from memfit.sim.simulator import Timeline, simulate
from memfit.sim.verifier import check
from memfit.strategies import milp
from tests.ir.random_graphs import step_graphs
from tests.strategies.builders import chain, residual, unet


def timeline(graph: StepGraph, order: list[int]) -> Timeline:
    program = program_of(graph, order)
    check(graph, program)
    return simulate(graph, program)


def plain_peak(graph: StepGraph) -> int:
    return timeline(graph, plain_order(graph)).peak_bytes


HAND_BUILT = [chain([8] * 12), chain([64, 32, 32, 8, 8, 8, 16, 64]), residual(5), unet(4)]


@given(step_graphs(max_forward=8), st.floats(0, 1))
@settings(max_examples=60)
def test_fits_or_says_from_where_on(graph: StepGraph, share: float) -> None:
    least = rotor.least_bytes(graph)
    budget = least + int(share * (plain_peak(graph) - least))
    found = timeline(graph, rotor.order(graph, budget))
    assert found.peak_bytes <= budget
    if budget < plain_peak(graph):
        assert found.recompute_seconds >= relaxed_bound(graph, budget) - 1e-6
    with pytest.raises(BudgetError) as raised:
        rotor.order(graph, least - 1)
    assert raised.value.least_bytes == least


@given(step_graphs(max_forward=8, exact=True))
@settings(max_examples=30)
def test_more_memory_is_never_slower(graph: StepGraph) -> None:
    least, plain = rotor.least_bytes(graph), plain_peak(graph)
    budgets = sorted({least + (plain - least) * i // 6 for i in range(7)})
    seconds = [timeline(graph, rotor.order(graph, budget)).recompute_seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0


@pytest.mark.parametrize("graph", HAND_BUILT, ids=["even", "uneven", "residual", "unet"])
def test_by_hand_built_steps_over_all_budgets(graph: StepGraph) -> None:
    least, plain = rotor.least_bytes(graph), plain_peak(graph)
    assert widest_op_bytes(graph) <= least < 0.8 * plain
    last = float("inf")
    for budget in range(least, plain + 1, max(1, (plain - least) // 12)):
        found = timeline(graph, rotor.order(graph, budget))
        assert found.peak_bytes <= budget
        assert relaxed_bound(graph, budget) - 1e-6 <= found.recompute_seconds <= last
        last = found.recompute_seconds


@pytest.mark.parametrize("length", [5, 7, 9])
def test_as_fast_as_the_proven_optimum_on_a_chain(length: int) -> None:
    graph = chain([8] * length)
    least, plain = rotor.least_bytes(graph), plain_peak(graph)
    assert least == widest_op_bytes(graph)
    for budget in range(least, plain + 1, 8):
        optimum = timeline(graph, milp.order(graph, budget)).recompute_seconds
        found = timeline(graph, rotor.order(graph, budget)).recompute_seconds
        if budget > least:
            assert found == pytest.approx(optimum)
        else:  # where nothing but one op fits, a boundary is held that could be made again
            assert optimum - 1e-6 <= found <= 2 * optimum


@pytest.mark.parametrize("graph", HAND_BUILT, ids=["even", "uneven", "residual", "unet"])
def test_without_time_only_stretches_of_one_block_are_priced(graph: StepGraph) -> None:
    site = site_of(graph, cut_chain(graph, most=24), span=64, narrow=0, patience=6, seconds=0)
    assert all(
        options and {option.stop for option in options} == {start + 1} for start, options in enumerate(site.options)
    )
    least, plain = rotor.least_bytes(graph), plain_peak(graph)
    budget = (least + plain) // 2
    hurried = rotor.fast_order(graph, budget, seconds=0)
    assert hurried is not None
    found = timeline(graph, hurried)
    assert found.peak_bytes <= budget
    assert found.recompute_seconds >= timeline(graph, rotor.order(graph, budget)).recompute_seconds


def test_below_the_widest_op_there_is_no_fast_order() -> None:
    graph = residual(5)
    assert rotor.fast_order(graph, widest_op_bytes(graph) - 1) is None


def test_without_a_budget_nothing_runs_again() -> None:
    graph = residual(2)
    assert rotor.order(graph, None) == plain_order(graph)


def test_eighty_blocks_in_seconds() -> None:
    graph = chain([8] * 81)
    cut = cut_chain(graph, most=80)
    assert len(cut.blocks) == 80
    site = site_of(graph, cut, span=6, narrow=0, patience=24)
    begin = time.process_time()
    fill(site, slots=500, slot_bytes=2)
    assert time.process_time() - begin < 20  # one or two on an idle machine


def shape(graph: StepGraph, start: int, stop: int, *, most: int = 6) -> Shape:
    lasts = [
        max((i for i, op in enumerate(graph.ops) if s in op.reads), default=-1) for s in range(len(graph.storages))
    ]
    cut = cut_chain(graph, most=most)
    return shape_of(graph, cut, lasts, start, min(stop, len(cut.blocks)))


def test_equal_units_are_one_shape() -> None:
    graph = residual(5)
    assert shape(graph, 1, 2, most=5) != shape(graph, 0, 1, most=5)
    assert shape(graph, 2, 3, most=5) == shape(graph, 3, 4, most=5)


@pytest.mark.parametrize("graph", HAND_BUILT, ids=["even", "uneven", "residual", "unet"])
def test_options_trade_bytes_and_peak_for_time(graph: StepGraph) -> None:
    run = shape(graph, 1, 3)
    options = options_of(run, 0, 24)
    saved = [sum(run.sizes[s] for s in option.saved) for option in options]
    fastest = [option.backwards[0].seconds for option in options]
    assert saved == sorted(saved, reverse=True) and saved[-1] == 0
    assert fastest == sorted(fastest)
    for option in options:
        peaks = [backward.peak for backward in option.backwards]
        assert peaks == sorted(peaks, reverse=True)
        for backward in option.backwards:
            bytes_at, needed = profile(run, backward.sequence, run.leaving)
            assert max(bytes_at) == backward.peak
            assert needed <= {*run.given, *run.out, *option.saved, *run.arriving}
            assert sorted(i for i in backward.sequence if i >= run.forward) == list(range(run.forward, len(run.ops)))


def test_a_cone_is_what_has_to_run_again() -> None:
    run = shape(chain([8] * 12), 0, 6)
    last = run.ops[run.forward - 2].writes[0]  # the very last result is held
    assert cone(run, [last], run.given) == list(range(run.forward - 1))
    assert cone(run, [last], {last}) == []
