"""The known strategies: valid programs, within the budget where they take one, and what their papers say they do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import BudgetError, SpecError
from memfit.ir.graph import Phase, StepGraph
from memfit.ir.program import baseline_order, program_of
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.sim.simulator import Timeline, simulate
from memfit.sim.verifier import check
from memfit.strategies import check_name, find, names
from memfit.strategies.every_block import block_name
from tests.ir.random_graphs import step_graphs
from tests.strategies.builders import Layer, chain, mirrored, residual, unet

BUDGETED = ("knapsack", "mu-two", "rotor", "milp")
WITHOUT = ("none", "sqrt", "every-block", "openai-speed", "openai-memory", "sequential:1", "sequential:3")


def timeline(graph: StepGraph, order: list[int]) -> Timeline:
    program = program_of(graph, order)
    check(graph, program)
    return simulate(graph, program)


def again(graph: StepGraph, order: list[int]) -> list[str]:
    return [graph.ops[i].name for i in program_of(graph, order).recomputed()]


@given(step_graphs(max_forward=7), st.sampled_from(WITHOUT))
@settings(max_examples=60)
def test_orders_are_valid(graph: StepGraph, name: str) -> None:
    found = timeline(graph, find(name)(graph, None))
    assert found.recompute_seconds >= relaxed_bound_or_nothing(graph, found.peak_bytes) - 1e-6
    assert find(name)(graph, 1) == find(name)(graph, None), "without a budget"


def relaxed_bound_or_nothing(graph: StepGraph, budget: int) -> float:
    if budget >= timeline(graph, baseline_order(graph)).peak_bytes:
        return 0.0
    return relaxed_bound(graph, budget)


@given(step_graphs(max_forward=4), st.sampled_from(BUDGETED), st.floats(0, 1))
@settings(max_examples=60)
def test_budgets_are_kept(graph: StepGraph, name: str, share: float) -> None:
    budget = int(share * timeline(graph, baseline_order(graph)).peak_bytes)
    try:
        found = timeline(graph, find(name)(graph, budget))
    except BudgetError as error:
        assert error.budget_bytes == budget < error.least_bytes
        found = timeline(graph, find(name)(graph, error.least_bytes))
        budget = error.least_bytes
    assert found.peak_bytes <= budget
    assert found.recompute_seconds >= relaxed_bound_or_nothing(graph, budget) - 1e-6


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("graph", [chain([8] * 9), residual(2), unet(3)], ids=["chain", "residual", "unet"])
def test_budgets_are_kept_on_steps_built_by_hand(name: str, graph: StepGraph) -> None:
    plain = timeline(graph, baseline_order(graph)).peak_bytes
    for percent in (95, 85, 75):
        try:
            found = timeline(graph, find(name)(graph, plain * percent // 100))
        except BudgetError as error:
            found = timeline(graph, find(name)(graph, error.least_bytes))
        assert 0 < found.recompute_seconds < math.inf
        assert found.peak_bytes < plain


def test_sqrt_runs_the_forward_pass_about_once_more_in_little_memory() -> None:
    graph = chain([8] * 26)
    found = timeline(graph, find("sqrt")(graph, None))
    assert 18 <= found.recompute_seconds <= 26
    assert found.peak_bytes <= 8 * (2 * math.isqrt(26) + 6)
    assert found.peak_bytes < 0.6 * timeline(graph, baseline_order(graph)).peak_bytes


def test_sequential_does_not_run_its_last_segment_again() -> None:
    graph = chain([8] * 13)
    found = again(graph, find("sequential:4")(graph, None))
    assert found, "the others do"
    assert not {"l9", "l10", "l11", "l12"} & set(found)
    assert again(graph, find("sequential:1")(graph, None)) == []


def test_every_block_runs_blocks_again_one_by_one_and_nothing_else() -> None:
    graph = residual(3)
    found = again(graph, find("every-block")(graph, None))
    assert "stem" not in found
    assert [name[:2] for name in found] == sorted((name[:2] for name in found), reverse=True)
    assert {name[:2] for name in found} == {"u0", "u1", "u2"}


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("layer1.0.conv2", "layer1.0"),
        ("layer1.0.downsample.1", "layer1.0"),
        ("features.12.conv.0.1", "features.12"),
        ("transformer.h.11.attn.c_proj", "transformer.h.11"),
        ("stages.2.blocks.4.norm", "stages.2.blocks.4"),
        ("model.layers.3", "model.layers.3"),
        ("features.denseblock1.denselayer2", ""),
        ("head", ""),
        ("", ""),
    ],
)
def test_the_block_of_a_module(module: str, block: str) -> None:
    assert block_name(module) == block


def test_openai_speed_keeps_what_is_slow() -> None:
    graph = residual(3)
    found = again(graph, find("openai-speed")(graph, None))
    assert found and not [name for name in found if name.endswith(("narrow", "wide"))]


def test_openai_memory_keeps_bottlenecks() -> None:
    graph = residual(6)
    found = timeline(graph, find("openai-memory")(graph, None))
    assert found.recompute_seconds > 0
    assert found.peak_bytes < 0.8 * timeline(graph, baseline_order(graph)).peak_bytes


def test_openai_collection_keeps_the_outputs_of_modules() -> None:
    graph = residual(3)
    found = again(graph, find("openai-collection:layer.0,layer.1")(graph, None))
    assert not {"u0_relu", "u1_relu"} & set(found)
    with pytest.raises(SpecError, match=r"no op of the step belongs to module 'layer.9'"):
        find("openai-collection:layer.9")(graph, None)


def test_knapsack_recomputes_more_the_less_there_is() -> None:
    graph = residual(4)
    plain = timeline(graph, baseline_order(graph)).peak_bytes
    with pytest.raises(BudgetError) as raised:
        find("knapsack")(graph, 1)
    budgets = [plain, (plain + raised.value.least_bytes) // 2, raised.value.least_bytes]
    seconds = [timeline(graph, find("knapsack")(graph, budget)).recompute_seconds for budget in budgets]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_mu_two_evicts_what_is_large_and_quick_first() -> None:
    layers = [
        Layer(name="a", reads=(), nbytes=8),
        Layer(name="cheap", reads=("a",), nbytes=64, seconds=1.0),
        Layer(name="b", reads=("cheap",), nbytes=8),
        Layer(name="dear", reads=("b",), nbytes=64, seconds=9.0),
        Layer(name="c", reads=("dear",), nbytes=8),
        *(Layer(name=f"d{i}", reads=(f"d{i - 1}" if i else "c",), nbytes=32) for i in range(3)),
    ]
    graph = mirrored(layers)
    plain = timeline(graph, baseline_order(graph)).peak_bytes
    assert again(graph, find("mu-two")(graph, plain - 1)) == ["cheap"]


def test_every_name_is_found() -> None:
    assert {"auto", "none", "rotor", "milp", "sequential:"} <= set(names())
    for name in names():
        parameter = {"sequential:": "3", "openai-collection:": "a", "tile:": "3x5", "micro-batch:": "4"}.get(name, "")
        check_name(name + parameter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rottor", "did you mean rotor"),
        ("openai", "did you mean openai"),
        ("qqq", "auto, none, sqrt"),
        ("sequential", "needs a number of segments"),
        ("sequential:0", "positive number"),
        ("tile", "needs a grid such as 4x4"),
        ("tile:4", "needs a grid such as 4x4"),
        ("tile:0x2", "needs a grid such as 4x4"),
        ("micro-batch", "needs a number of micro-batches"),
        ("micro-batch:1", "needs a number of micro-batches"),
        ("sequential:two", "positive number"),
        ("openai-collection:", "needs names of modules"),
        ("sqrt:4", "takes no parameter"),
    ],
)
def test_an_unknown_name_is_refused_with_close_ones(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find(name)


def test_no_other_phase_runs_again() -> None:
    graph = residual(3)
    for name in WITHOUT:
        program = program_of(graph, find(name)(graph, None))
        assert all(graph.ops[i].phase is Phase.FORWARD for i in program.recomputed())
