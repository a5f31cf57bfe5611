"""No program above the budget passes the end of a search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memfit.errors import BudgetError, ProgramError
from memfit.ir.graph import StepGraph
from memfit.ir.program import program_of
from memfit.planner.budget_limit import fitting, within_limit
from memfit.planner.finalize.variant_selection import leanest, program_within
from memfit.refusals import refused
from memfit.sim.simulator import simulate
from tests.ir.random_graphs import sliced_steps_and_orders


@given(sliced_steps_and_orders())
@settings(max_examples=40)
def test_what_is_made_of_an_order_stays_within_what_it_needs(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    lean = leanest(graph)
    peak = simulate(lean, program_of(lean, order)).peak_bytes
    for budget in (peak, peak + 50):
        program = program_within(graph, order, budget)
        assert fitting(graph, program, budget).peak_bytes <= budget
        with pytest.raises(ProgramError, match="never run"):
            fitting(graph, program, simulate(graph, program).peak_bytes - 1)
    whole = program_of(graph, order, in_place=False, fuse=False)
    assert simulate(graph, within_limit(lean, program_of(lean, order), whole, peak)).peak_bytes <= max(
        peak, simulate(graph, program_of(lean, order)).peak_bytes
    )


def test_an_error_names_one_budget_and_what_was_missed() -> None:
    error = refused(
        BudgetError("no plan fits -3.0 MiB", budget_bytes=-3 << 20, least_bytes=2 << 20, binding="op"),
        budget_bytes=1 << 20,
        missed_bytes=4 << 20,
    )
    assert (error.budget_bytes, error.least_bytes) == (1 << 20, 6 << 20)
    assert "-3" not in str(error) and "no plan fits 1.0 MiB" in str(error) and str(6 << 20) in str(error)
