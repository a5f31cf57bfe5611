"""Swaps in programs: what leaves comes back as it was, and links take the time they take."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import PlanFileError, ProgramError
from memfit.ir.graph import StepGraph
from memfit.ir.instructions import Compute, Free, Instruction, SwapIn, SwapOut
from memfit.ir.jsonfile import as_document, record_of
from memfit.ir.program import Program, baseline_order, program_of
from memfit.ir.serialization import decode_graph, encode_graph
from memfit.ir.tiers import Link, Tier, TierLinks
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.ir.random_swaps import steps_with_swaps
from tests.planner.chains import chain
from tests.sim.machine import run_on_machine

OUT = Link(bytes_per_second=10.0)
INTO = Link(bytes_per_second=5.0)


def with_disk(graph: StepGraph, *, out: Link = OUT, into: Link = INTO, limit_bytes: int | None = None) -> StepGraph:
    return replace(graph, tiers=(TierLinks(tier=Tier.DISK, out=out, into=into, limit_bytes=limit_bytes),))


def swapped_chain(*, freed_after: int = 0, back_before: int = 0) -> tuple[StepGraph, Program]:
    """A chain of four ops whose first result leaves and comes back; it is freed and brought back so many ops apart."""
    graph = with_disk(chain(4))
    program = list(program_of(graph, baseline_order(graph)).instructions)
    made = program.index(Compute(0))
    program.insert(made + 1, SwapOut(1, Tier.DISK))
    computes = [n for n, i in enumerate(program) if isinstance(i, Compute)]
    reader = program.index(Compute(1))
    first_back = next(n for n in computes if graph.ops[program[n].op].name == "b1")
    program.insert(computes[computes.index(first_back) - back_before], SwapIn(1))
    program.insert(computes[computes.index(reader) + freed_after] + 1, Free(1))
    return graph, Program(instructions=tuple(program))


def test_compute_waits_for_links() -> None:
    graph, program = swapped_chain()
    check(graph, program)
    timeline = simulate(graph, program)
    # Forward ops take 1 s and backward ops 2 s each; 10 bytes take 1 s out and 2 s back. The copy out runs beside f1;
    # the copy back begins when b1 wants to.
    assert timeline.step_seconds == 4 + 8 + 2
    assert timeline.stalls == {1: 2} and timeline.stall_seconds == 2
    assert (timeline.out_bytes, timeline.in_bytes, timeline.tier_bytes) == (10, 10, {Tier.DISK: 10})
    assert timeline.overlap == pytest.approx(1 / 3)
    early = simulate(*swapped_chain(back_before=1))
    assert (early.step_seconds, early.stall_seconds, early.overlap) == (12, 0, 1)


def test_memory_is_given_up_when_the_copy_is_out() -> None:
    graph, program = swapped_chain()
    slow = with_disk(graph, out=Link(bytes_per_second=2.0))
    assert simulate(slow, program).stall_seconds == 4 + 2  # 5 s out, of which f1 hides one
    assert simulate(slow, swapped_chain(freed_after=2)[1]).stall_seconds == 2 + 2


def test_latency_and_what_copies_take_from_compute() -> None:
    graph, program = swapped_chain(back_before=1)
    taking = Link(bytes_per_second=10.0, latency_seconds=0.5, compute_seconds_per_byte=0.01)
    timeline = simulate(with_disk(graph, out=taking, into=taking), program)
    assert timeline.step_seconds == pytest.approx(12 + 0.2 + 0.4)  # 1.5 s out beside f1 and what the copy takes of it


def test_the_peak_is_lower() -> None:
    graph, program = swapped_chain()
    assert simulate(graph, program).peak_bytes < simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes


@given(steps_with_swaps())
@settings(max_examples=40)
def test_programs_with_swaps_are_right(case: tuple[StepGraph, Program]) -> None:
    graph, program = case
    check(graph, program)
    run_on_machine(graph, program)
    assert record_of(json.loads(json.dumps(as_document(program))), Program) == program
    assert decode_graph(json.loads(json.dumps(encode_graph(graph)))) == graph


@given(steps_with_swaps())
@settings(max_examples=40)
def test_links_only_ever_add_time(case: tuple[StepGraph, Program]) -> None:
    graph, program = case
    timeline, alone = simulate(graph, program), simulate(graph, program, wait=False)
    assert timeline.step_seconds == pytest.approx(alone.step_seconds + timeline.stall_seconds)
    assert timeline.bytes_at == alone.bytes_at
    moved = sum(graph.storages[i.storage].nbytes for i in program.instructions if isinstance(i, SwapIn))
    assert timeline.in_bytes == moved
    assert timeline.out_bytes == sum(graph.storages[s].nbytes for s in program.swapped())


@given(steps_with_swaps(), st.data())
@settings(max_examples=40)
def test_what_is_left_out_is_noticed(case: tuple[StepGraph, Program], data: st.DataObject) -> None:
    graph, program = case
    moves = [n for n, i in enumerate(program.instructions) if isinstance(i, SwapOut | SwapIn)]
    if not moves:
        return
    gone = data.draw(st.sampled_from(moves))
    less = Program(instructions=(*program.instructions[:gone], *program.instructions[gone + 1 :]))
    with pytest.raises(ProgramError):
        check(graph, less)


@pytest.mark.smoke
def test_the_specification_says_what_is_wrong() -> None:
    graph, program = swapped_chain()
    out = program.instructions.index(SwapOut(1, Tier.DISK))
    back = program.instructions.index(SwapIn(1))

    def having(place: int, *instructions: Instruction) -> Program:
        return Program(instructions=(*program.instructions[:place], *instructions, *program.instructions[place:]))

    cases = [
        (having(out, SwapIn(1)), "swaps in a0, which is on no tier"),
        (having(back + 1, SwapIn(1)), "swaps in a0, which is still alive"),
        (having(out + 1, SwapOut(1, Tier.DISK)), "swaps out a0 twice"),
        (having(out, SwapOut(2, Tier.DISK), SwapIn(2)), "not alive"),
        (having(0, SwapOut(0, Tier.DISK)), "no forward result of the step's own"),
        (having(0, SwapIn(99)), "swaps in storage 99, but the step has"),
    ]
    for wrong, message in cases:
        with pytest.raises(ProgramError, match=message):
            check(graph, wrong)
    with pytest.raises(ProgramError, match="4096 bytes are swapped to disk, which may hold 4095"):
        check(with_disk(graph, limit_bytes=4095), program)


def test_a_subgraph_gives_up_what_leaves_before_the_loss_or_in_its_backward_pass() -> None:
    graph, program = swapped_chain(freed_after=2)
    _, late = swapped_chain(freed_after=3)
    check(graph, late)
    apart = replace(graph, ops=tuple(replace(op, subgraph=int(op.name in ("f3", "b3"))) for op in graph.ops))
    check(apart, program)
    with pytest.raises(ProgramError, match="gives a0 up before the backward pass of its subgraph"):
        check(apart, late)


def test_damaged_swaps_are_refused() -> None:
    for entry in (["o", 1, "tape"], ["i", 1, 2], ["o", "disk"]):
        with pytest.raises(PlanFileError):
            record_of({"instructions": [entry]}, Program)
