"""Storages that live on tiers: slices of them come and go, and nothing of them is in memory whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import ProgramError
from memfit.ir.graph import Op, Phase, StepGraph
from memfit.ir.instructions import Free, SwapIn, SwapOut, TierResident
from memfit.ir.jsonfile import as_document, record_of
from memfit.ir.program import Program, baseline_order, program_of
from memfit.ir.streaming import streamable, streaming_step, tier_bytes
from memfit.ir.tiers import Link, Tier, TierLinks
from memfit.sim.simulator import live_storages_at, simulate, simulate_baseline
from memfit.sim.verifier import check
from tests.ir.random_graphs import orders, sliced_step_graphs
from tests.ir.random_swaps import links
from tests.sim.machine import run_on_machine
from tests.sim.test_fusion import chain


def streaming(graph: StepGraph, placed: dict[int, Tier], order: list[int]) -> Program:
    """The program of an order in which some storages live on tiers."""
    named = tuple(TierResident(s, tier) for s, tier in placed.items())
    return Program(instructions=(*named, *program_of(streaming_step(graph, placed), order).instructions))


@st.composite
def steps_with_streams(draw: st.DrawFn) -> tuple[StepGraph, Program]:
    graph = draw(sliced_step_graphs())
    tiers = tuple(TierLinks(tier=tier, out=draw(links()), into=draw(links()), buffer_bytes=7) for tier in Tier)
    graph = replace(graph, tiers=tiers)
    able = streamable(graph, least_bytes=0)
    placed = {s: draw(st.sampled_from(list(Tier))) for s in able if draw(st.sampled_from([True, True, False]))}
    return graph, streaming(graph, placed, draw(orders(streaming_step(graph, placed), max_again=4)))


@given(steps_with_streams())
@settings(max_examples=100)
def test_programs_that_stream_are_right(case: tuple[StepGraph, Program]) -> None:
    graph, program = case
    check(graph, program)
    run_on_machine(graph, program)
    assert record_of(json.loads(json.dumps(as_document(program))), Program) == program


@given(steps_with_streams())
@settings(max_examples=40)
def test_a_program_that_streams_is_one_of_the_streaming_step(case: tuple[StepGraph, Program]) -> None:
    graph, program = case
    placed = program.tier_resident()
    of_step = Program(instructions=tuple(i for i in program.instructions if not isinstance(i, TierResident)))
    given_names, alone = simulate(graph, program), simulate(streaming_step(graph, placed), of_step)
    assert (given_names.peak_bytes, given_names.step_seconds) == (alone.peak_bytes, alone.step_seconds)
    assert given_names.plain_seconds == graph.plain_seconds
    assert simulate_baseline(streaming_step(graph, placed)).bytes_at == tuple(
        nbytes + graph.buffer_bytes(placed.values()) for nbytes in simulate_baseline(graph).bytes_at
    )


def tiled_chain(**of_disk: object) -> StepGraph:
    """The chain of `tests.sim.test_fusion` with a backward op for each, all of which can run slice by slice."""
    graph, _ = chain(first=True)

    def able(op: Op) -> Op:
        kind = replace(op.by_slices, reads=op.reads) if op.by_slices is not None else None
        other = graph.ops[0].by_slices
        assert other is not None
        return op if op.phase is Phase.LOSS else replace(op, by_slices=kind or replace(other, reads=op.reads))

    ops = tuple(map(able, graph.ops))
    disk = TierLinks(tier=Tier.DISK, **{"out": Link(bytes_per_second=200.0), "into": Link(bytes_per_second=400.0)})
    return replace(graph, ops=ops, tiers=(replace(disk, **of_disk),))


@pytest.mark.smoke
def test_a_chain_by_hand() -> None:
    graph = tiled_chain()
    # Outputs and gradients are the caller's, and the loss takes the tangent whole.
    assert streamable(graph, least_bytes=0) == [1, 2, 3]
    program = streaming(graph, {3: Tier.DISK}, baseline_order(graph))
    check(graph, program)
    timeline = simulate(graph, program)
    assert (timeline.out_bytes, timeline.in_bytes) == (400, 400 + 400)
    # Two runs read it, the last forward op and the backward op, with 4 s of ops before it leaves: nothing waits.
    whole = simulate(graph, program_of(graph, baseline_order(graph)))
    assert timeline.stall_seconds == 0 and timeline.peak_bytes < whole.peak_bytes
    assert all(3 not in live_storages_at(graph, program, place) for place in range(len(program.instructions)))
    slow = replace(graph.tiers[0], into=Link(bytes_per_second=100.0, compute_seconds_per_byte=0.001))
    slower = simulate(replace(graph, tiers=(slow,)), program)
    # Coming back takes 4 s beside ops of 1 s, of which the copies take 0.4 s.
    assert slower.stall_seconds == pytest.approx(2 * (4 - 1 - 0.4))
    assert slower.step_seconds == pytest.approx(timeline.step_seconds + 2 * (4 - 1))


def test_each_slice_begins_on_a_page_of_its_own() -> None:
    assert tier_bytes(tiled_chain(), 3) == 4 * 4096


@pytest.mark.smoke
def test_the_specification_says_what_is_wrong() -> None:
    graph = tiled_chain()
    program = streaming(graph, {3: Tier.DISK}, baseline_order(graph))
    names, rest = program.instructions[:1], program.instructions[1:]
    first, *others = program_of(streaming_step(graph, {3: Tier.DISK}), baseline_order(graph), fuse=False).instructions
    back = SwapIn(1), Free(1)
    moved_whole = (first, SwapOut(1, Tier.DISK), *others, *back)
    reads_whole = replace(graph.ops[3], by_slices=replace(graph.ops[3].by_slices, reads=()))  # type: ignore[type-var]
    cases = [
        (graph, (*names, *names, *rest), "too late, twice"),
        (graph, (*rest, *names), "too late, twice"),
        (graph, (TierResident(4, Tier.DISK), *rest), "not all ops touch slices"),
        (graph, (TierResident(99, Tier.DISK), *rest), "the step has 7 storages"),
        (
            graph,
            (*names, *program_of(graph, baseline_order(graph), fuse=False).instructions),
            "runs whole, but not all",
        ),
        (
            replace(graph, ops=(*graph.ops[:3], reads_whole, *graph.ops[4:])),
            (*names, *rest),
            "not all ops touch",
        ),
        (graph, (*names, *moved_whole), "moved there whole"),
        (tiled_chain(limit_bytes=4 * 4096 - 1), (*names, *rest), "which may hold"),
    ]
    for step, wrong, message in cases:
        with pytest.raises(ProgramError, match=message):
            check(step, Program(instructions=wrong))
