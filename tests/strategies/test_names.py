"""Every strategy gives a valid program, and the ones with a budget keep it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memfit import strategies
from memfit.errors import BudgetError, SpecError
from memfit.ir.graph import StepGraph
from memfit.ir.program import baseline_order, program_of
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.ir.random_graphs import step_graphs
from tests.planner.chains import chain

WITHOUT_BUDGET = ("none", "sqrt", "every-block", "openai-speed", "openai-memory", "sequential:1", "sequential:3")
WITH_BUDGET = ("knapsack", "mu-two", "rotor")


@pytest.mark.parametrize("name", WITHOUT_BUDGET)
@settings(max_examples=25)
@given(graph=step_graphs())
def test_valid_on_random_steps(name: str, graph: StepGraph) -> None:
    check(graph, program_of(graph, strategies.find(name)(graph, None)))


@pytest.mark.parametrize("name", WITH_BUDGET)
@settings(max_examples=25)
@given(graph=step_graphs())
def test_budget_is_kept_on_random_steps(name: str, graph: StepGraph) -> None:
    budget = int(simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes * 0.8)
    if budget <= 0:
        return
    try:
        program = program_of(graph, strategies.find(name)(graph, budget))
    except BudgetError as error:
        assert error.least_bytes > budget
        return
    check(graph, program)
    assert simulate(graph, program).peak_bytes <= budget


def peak_and_reruns(name: str, length: int = 16) -> tuple[int, int]:
    graph = chain(length)
    program = program_of(graph, strategies.find(name)(graph, None))
    return simulate(graph, program).peak_bytes, len(program.recomputed())


def test_sqrt_keeps_sqrt_segments() -> None:
    plain, _ = peak_and_reruns("none")
    peak, reruns = peak_and_reruns("sqrt")
    assert peak <= plain // 2 and reruns <= 16


def test_sequential_leaves_the_last_segment() -> None:
    assert peak_and_reruns("sequential:1")[1] == 0
    _, reruns = peak_and_reruns("sequential:4")
    assert 8 <= reruns <= 12


def test_every_block_runs_every_block_again() -> None:
    graph = chain(6)
    again = program_of(graph, strategies.find("every-block")(graph, None)).recomputed()
    assert set(again) <= set(range(6))


def test_mu_two_evicts_only_what_it_must() -> None:
    graph = chain(8)
    assert simulate(graph, program_of(graph, strategies.find("mu-two")(graph, 90))).recompute_seconds == 1.0


@pytest.mark.parametrize("name", ["sqart", "sequential", "sequential:x", "sequential:0", "openai-collection", "none:1"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(SpecError):
        strategies.find(name)


def test_collection_names_modules() -> None:
    graph = chain(6)
    order = strategies.find("openai-collection:layers.2")(graph, None)
    check(graph, program_of(graph, order))
    with pytest.raises(SpecError, match=r"layers\.9"):
        strategies.find("openai-collection:layers.9")(graph, None)
