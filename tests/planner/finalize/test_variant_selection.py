"""Ops run whole where there is room and in chunks where there is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import BudgetError, ProgramError
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind, Variant
from memfit.ir.instructions import Compute, computes_in
from memfit.ir.jsonfile import as_document, record_of
from memfit.ir.program import Program, baseline_order, program_of
from memfit.ir.serialization import decode_graph, encode_graph
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.planner.finalize.variant_selection import leanest, program_within, quicker
from memfit.planner.search.portfolio import find_order
from memfit.sim.simulator import simulate, simulate_baseline
from memfit.sim.verifier import check
from tests.ir.random_graphs import sliced_steps_and_orders
from tests.residents import residents

_VARIANTS = (
    Variant(chunks=1, seconds=2.0, workspace_bytes=50),
    Variant(chunks=4, seconds=1.0, workspace_bytes=30),
    Variant(chunks=8, seconds=3.0, workspace_bytes=10),
)


def step() -> StepGraph:
    """Two forward and two backward ops of 100 bytes each; the first can run in chunks."""
    kinds = ("static", "forward", "forward", "tangent", "backward", "gradient")
    storages = tuple(Storage(name=f"s{i}", nbytes=100, kind=StorageKind(kind)) for i, kind in enumerate(kinds))
    chunked = {"seconds": 1.0, "workspace_bytes": 30, "chunks": 4, "variants": _VARIANTS}
    ops = (
        Op(name="first", target="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), **chunked),
        Op(name="second", target="g", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=1.0),
        Op(name="loss", target="loss", phase=Phase.LOSS, reads=(2,), writes=(3,)),
        Op(name="second_back", target="h", phase=Phase.BACKWARD, reads=(1, 3), writes=(4,), **chunked),
        Op(name="first_back", target="k", phase=Phase.BACKWARD, reads=(0, 4), writes=(5,), seconds=1.0),
    )
    return StepGraph(ops=ops, storages=storages, residents=residents(100))


@pytest.mark.parametrize(("budget", "chunks"), [(1000, 4), (430, 4), (429, 8), (None, 8), (0, 8)])
def test_each_run_gets_the_quickest_variant_there_is_room_for(budget: int | None, chunks: int) -> None:
    graph = step()
    program = program_within(graph, baseline_order(graph), budget)
    check(graph, program)
    assert next(i.chunks for i in computes_in(program.instructions) if i.op == 3 and i.chunks > 1) == chunks
    # Elsewhere there is room: the first op is far from the peak.
    assert program.instructions[0].chunks == 4
    assert simulate(graph, program).peak_bytes <= max(budget or 0, 410)


@pytest.mark.parametrize(("budget", "in_place_seconds", "over"), [(1000, 1.5, None), (None, 1.5, 2), (1000, 0.5, 2)])
def test_an_op_writes_over_its_operand_where_that_is_faster_or_room_is_short(
    budget: int | None, in_place_seconds: float, over: int | None
) -> None:
    sizes = {"static": 100, "forward": 100, "tangent": 0, "gradient": 0}
    kinds = ("static", "forward", "forward", "forward", "tangent", "gradient")
    storages = tuple(Storage(name=f"s{i}", nbytes=sizes[k], kind=StorageKind(k)) for i, k in enumerate(kinds))
    costs = {"in_place_over": (2,), "in_place_seconds": in_place_seconds}
    ops = (
        Op(name="first", target="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1.0),
        Op(name="second", target="g", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=1.0),
        Op(name="third", target="h", phase=Phase.FORWARD, reads=(2,), writes=(3,), seconds=1.0, **costs),
        Op(name="loss", target="loss", phase=Phase.LOSS, reads=(3,), writes=(4,)),
        Op(name="back", target="k", phase=Phase.BACKWARD, reads=(1, 3, 4), writes=(5,), seconds=1.0),
    )
    graph = StepGraph(ops=ops, storages=storages, residents=residents(100))
    program = program_within(graph, baseline_order(graph), budget)
    check(graph, program)
    assert next(i.over for i in program.instructions if isinstance(i, Compute) and i.op == 2) == over
    assert simulate(graph, program).overhead <= (0.0 if budget else 0.5 / 4)


def test_plain_steps_run_whole_and_are_what_time_is_compared_with() -> None:
    graph = step()
    plain = simulate_baseline(graph)
    assert (plain.step_seconds, plain.overhead, plain.peak_bytes) == (6.0, 0.0, 450)
    assert (graph.seconds, graph.plain_seconds) == (4.0, 6.0)
    assert simulate(graph, program_within(graph, baseline_order(graph), 1000)).overhead == pytest.approx(-1 / 3)
    assert sum(op.seconds for op in leanest(graph).ops) == 8.0
    assert widest_op_bytes(graph) == 410


def test_the_least_budget_uses_the_leanest_variants() -> None:
    graph = step()
    with pytest.raises(BudgetError) as caught:
        find_order(graph, 405, seconds=0.1)
    assert 410 <= caught.value.least_bytes
    assert find_order(graph, 410, seconds=0.1).timeline.peak_bytes == 410


def test_ways_survive_being_written_down() -> None:
    graph = step()
    assert decode_graph(encode_graph(graph)) == graph
    program = program_within(graph, baseline_order(graph), 410)
    assert record_of(as_document(program), Program) == program


def test_only_in_chunks_does_an_op_that_can_be_chunked_write_over_its_operand() -> None:
    graph = step()
    graph = replace(graph, ops=(*graph.ops[:3], replace(graph.ops[3], in_place_over=(1,)), *graph.ops[4:]))
    program = program_within(graph, baseline_order(graph), 310)
    check(graph, program)
    place = next(p for p, i in enumerate(program.instructions) if isinstance(i, Compute) and i.over is not None)
    whole = (*program.instructions[:place], replace(program.instructions[place], chunks=1))
    with pytest.raises(ProgramError, match="as a whole"):
        check(graph, Program(instructions=(*whole, *program.instructions[place + 1 :])))
    # Where there is room the quickest variant runs, and what it cannot write over is freed after it.
    quick = tuple(w for w in _VARIANTS if w.chunks != 4)
    roomy = replace(graph, ops=(*graph.ops[:3], replace(graph.ops[3], chunks=8, variants=quick), *graph.ops[4:]))
    program = program_within(roomy, baseline_order(roomy), 1000)
    check(roomy, program)
    assert all(i.over is None for i in computes_in(program.instructions))


@given(sliced_steps_and_orders(), st.sampled_from([0, 100, 300, 10_000]))
@settings(max_examples=40)
def test_ops_run_as_one_where_that_is_quicker(case: tuple[StepGraph, list[int]], more: int) -> None:
    graph, order = case
    lean = leanest(graph)
    least = simulate(lean, program_of(lean, order)).peak_bytes
    program = program_within(graph, order, least + more)
    check(graph, program)
    assert program.order() == order
    timeline = simulate(graph, program)
    assert timeline.peak_bytes <= least + more
    for fuse in (True, False):
        other = simulate(graph, program_of(graph, order, fuse=fuse))
        assert other.peak_bytes > least + more or timeline.step_seconds <= other.step_seconds + 1e-9


@pytest.mark.parametrize(("budget", "chunks"), [(1000, 4), (430, 4), (429, 8)])
def test_the_quicker_ways_there_is_room_for_come_before_copies(budget: int, chunks: int) -> None:
    graph = step()
    quick = quicker(graph, baseline_order(graph), budget)
    assert [op.chunks for op in quick.ops] == [4, 1, 1, chunks, 1]
    assert simulate(quick, program_of(quick, baseline_order(graph))).peak_bytes <= budget
