"""Fused regions: executed sample by sample on a model of memory, they make what each of them makes alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from memfit.errors import ProgramError
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.instructions import Compute, Free, Instruction, computes_in
from memfit.ir.program import Program, program_of
from memfit.ir.slicing import BySlices
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.ir.random_graphs import sliced_steps_and_orders
from tests.sim.machine import run_on_machine


@given(sliced_steps_and_orders())
@settings(max_examples=100)
def test_ops_that_run_as_one_make_what_they_make_alone(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    program = program_of(graph, order)
    check(graph, program)
    assert program.order() == order
    run_on_machine(graph, program)


@given(sliced_steps_and_orders())
@settings(max_examples=100)
def test_running_as_one_never_costs_memory(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    fused, alone = (simulate(graph, program_of(graph, order, fuse=f)) for f in (True, False))
    assert fused.peak_bytes <= alone.peak_bytes


def chain(**slices: object) -> tuple[StepGraph, list[int]]:
    """Three ops make four numbers of four; the last is what backward reads, so that all three run again."""
    kinds = [StorageKind.STATIC, *[StorageKind.FORWARD] * 4, StorageKind.TANGENT, StorageKind.GRADIENT]
    storages = tuple(Storage(name=f"s{i}", nbytes=400, kind=kind) for i, kind in enumerate(kinds))
    facts = {"batch": 4, "samples": 1, "seconds": 1.0, "workspace_bytes": 10} | slices

    def op(name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...], sliced: bool = True) -> Op:
        how = BySlices(**{"reads": reads, **facts}) if sliced else None
        return Op(name=name, target="t", phase=phase, reads=reads, writes=writes, seconds=1.0, by_slices=how)

    ops = (
        op("one", Phase.FORWARD, (0,), (1,)),
        op("two", Phase.FORWARD, (1,), (2,)),
        op("three", Phase.FORWARD, (1, 2), (3,)),
        op("last", Phase.FORWARD, (3,), (4,), sliced=False),
        op("loss", Phase.LOSS, (4,), (5,), sliced=False),
        op("back", Phase.BACKWARD, (3, 5), (6,), sliced=False),
    )
    return StepGraph(ops=ops, storages=storages, outputs=(4,)), [0, 1, 2, 3, 4, 0, 1, 2, 5]


@pytest.mark.smoke
def test_a_chain_by_hand() -> None:
    graph, order = chain()
    program = program_of(graph, order)
    (run,) = (run for run in program.runs() if any(i.sliced for i in computes_in(run)))
    assert [type(i) for i in run] == [Compute, Compute, Compute, Free, Free]
    position = program.instructions.index(run[0])
    # The output and its gradient, the result whole, and up to three slices of a quarter each.
    assert simulate(graph, program).bytes_at[position : position + 3] == tuple(1200 + 100 * n + 10 for n in (1, 2, 3))
    alone = simulate(graph, program_of(graph, order, fuse=False))
    assert alone.peak_bytes == 2000


def test_a_sum_that_nobody_reads_is_freed_at_once_where_ops_run_alone() -> None:
    """As one, the sum stays to the end: 100 + 100 and slices of 25, against 200 one by one."""
    kinds = [StorageKind.STATIC, StorageKind.FORWARD, StorageKind.TANGENT, *[StorageKind.BACKWARD] * 3]
    storages = [Storage(name=f"s{i}", nbytes=100, kind=kind) for i, kind in enumerate(kinds)]
    storages.append(Storage(name="gradient", nbytes=0, kind=StorageKind.GRADIENT))

    def op(phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...], sums: tuple[int, ...] | None = None) -> Op:
        facts = {"batch": 4, "samples": 1, "seconds": 1.0, "workspace_bytes": 0, "first": True, "accumulates": True}
        how = None if sums is None else BySlices(reads=reads, sums=sums, **facts)
        return Op(name="op", target="t", phase=phase, reads=reads, writes=writes, seconds=1.0, by_slices=how)

    ops = (
        op(Phase.FORWARD, (0,), (1,)),
        op(Phase.LOSS, (1,), (2,)),
        op(Phase.BACKWARD, (2,), (3, 4), sums=(4,)),
        op(Phase.BACKWARD, (3,), (5,), sums=()),
        op(Phase.BACKWARD, (2, 5), (6,)),
    )
    graph = StepGraph(ops=ops, storages=tuple(storages), outputs=(1,))
    fused, alone = (simulate(graph, program_of(graph, range(len(ops)), fuse=f)) for f in (True, False))
    assert fused.peak_bytes == alone.peak_bytes == 400


def changed(program: Program, place: int, *facts: Instruction) -> Program:
    return Program(instructions=(*program.instructions[:place], *facts, *program.instructions[place + 1 :]))


def test_the_specification_says_what_is_wrong() -> None:
    graph, order = chain()
    program = program_of(graph, order)
    first = next(p for p, i in enumerate(program.instructions) if i.fused)
    last = len(program.instructions) - 1
    start, end, first_run = (program.instructions[place] for place in (first, first + 4, 0))
    cases = [
        (changed(program, first, replace(start, chunks=2)), "cannot run in 2 slices"),
        (changed(program, first, start, Free(5, fused=True)), "what comes in is freed before"),
        (
            changed(program, first + 4, replace(end, fused=True)),
            "not of the same samples|only ops that ran before",
        ),
        (changed(program, first + 2, replace(program.instructions[first + 2], over=5)), "cannot run over s5"),
        (changed(program, last, replace(program.instructions[last], fused=True)), "there is none"),
        (
            changed(program, 0, replace(first_run, chunks=4, fused=True, sliced=True)),
            "where it ran before",
        ),
        (changed(program, first, Compute(99, fused=True)), "the step has 6 ops"),
        (changed(program, first, replace(start, sliced=False)), "cannot run in 4 slices"),
        (
            changed(program, first + 2, replace(program.instructions[first + 2], over=2)),
            "cannot run in place slice",
        ),
    ]
    for wrong, message in cases:
        with pytest.raises(ProgramError, match=message):
            check(graph, wrong)


def test_what_is_read_whole_is_not_handed_on_in_slices() -> None:
    graph, order = chain(reads=())
    assert not any(i.fused for i in program_of(graph, order).instructions)
    sliced, _ = chain()
    with pytest.raises(ProgramError, match="slice by slice"):
        check(graph, program_of(sliced, order))


@pytest.mark.parametrize("by_slices", [True, False])
def test_what_is_read_whole_is_not_overwritten(by_slices: bool) -> None:
    graph, _ = chain()
    one, two, three, *rest = graph.ops
    assert three.by_slices is not None
    slices = replace(three.by_slices, reads=(1, 2) if by_slices else (2,))
    storages = (graph.storages[0], replace(graph.storages[1], reusable=True), *graph.storages[2:])
    graph = replace(graph, ops=(one, two, replace(three, by_slices=slices), *rest), storages=storages)
    # The first result stays until it is read for the last time by the ops that run again.
    program = program_of(graph, [0, 1, 2, 3, 4, 1, 2, 5])
    check(graph, program)
    assert [i.over for i in computes_in(program.instructions) if i.over is not None] == ([1] if by_slices else [])


def test_what_comes_in_is_not_made_again_within() -> None:
    """The first copy of a storage is read by one op that runs again, the second one made right after."""
    graph, _ = chain()
    one, two, three, *rest = graph.ops
    graph = replace(graph, ops=(one, two, three, *rest))
    # Op two reads the copy of storage 1 that the loss left, op one makes it anew, and op three reads that.
    program = program_of(graph, [0, 1, 2, 3, 4, 1, 0, 2, 5])
    check(graph, program)
    assert [len(run) for run in program.runs() if any(i.sliced for i in computes_in(run))]
