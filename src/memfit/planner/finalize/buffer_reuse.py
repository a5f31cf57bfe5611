"""Buffer reuse: a result that is put together from slices takes over memory that nothing reads any more.

New memory from the system has to be mapped page by page, which can take longer than the op that fills it. An op that
runs slice by slice (`memfit.ir.fusion`) can put its result together in any given memory, so a storage of the same size
is not freed after its last read but taken over, if there is room for it until then.

Idea: buffer assignment of compilers, for speed only; it is done where the budget leaves room.

A free between the two halves of a call (`memfit.planner.finalize.merge_conv_backward`) stays: without it the halves
would run as one call, which takes more memory than either half.

Known limits: only results of recomputed ops, over storages of the same subgraph and pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from msgspec import structs

from memfit.ir.graph import Op, Phase, StepGraph
from memfit.ir.instructions import Compute, Free, Instruction, computes_in, freed_in
from memfit.ir.program import Program, are_halves
from memfit.sim.simulator import simulate

__all__ = ["with_spares"]


def with_spares(graph: StepGraph, program: Program, limit_bytes: int) -> Program:
    """The program with results of slices in the memory of storages that are not needed any more.

    Args:
        graph: the step.
        program: the program; its order stays.
        limit_bytes: for the peak.

    Returns:
        A program that is no slower, and within the limit if the given program is.
    """
    room = limit_bytes - np.array(simulate(graph, program).bytes_at, dtype=np.int64)
    subgraph = {s: op.subgraph for op in graph.ops for s in op.writes}
    instructions: list[Instruction | None] = list(program.instructions)
    held = graph.held_to_the_end()
    freed: dict[int, int] = {}  # place of the free by storage, in this pass, not written since; last free last
    ran: set[int] = set()
    start = 0
    apart = _keeping_halves_apart(graph, program)
    for run in program.runs():
        computes = [i.op for i in computes_in(run)]
        if any(graph.ops[index].phase is Phase.LOSS for index in computes):
            freed.clear()
        for storage in (s for index in computes for s in graph.ops[index].writes):
            freed.pop(storage, None)
        for position, instruction, op in _put_together(graph, run, start, ran, held):
            size = graph.storages[op.writes[0]].nbytes
            more = 0 if instruction.sliced else _more_bytes(graph, op, instruction)
            if more > max(0, int(room[position])) or not _is_quicker(op, instruction):
                continue
            fitting = (s for s in reversed(freed) if graph.storages[s].nbytes == size and subgraph[s] == op.subgraph)
            free = next(fitting, None)
            if free is None or (room[freed[free] + 1 : start] < size).any():
                continue
            place = freed.pop(free)
            assert op.by_slices is not None
            instructions[position] = structs.replace(instruction, over=free, chunks=op.by_slices.slices, sliced=True)
            instructions[place] = None
            room[place:start] -= size
            room[position] -= more
        first = run[0]
        if isinstance(first, Free) and graph.storages[first.storage].reusable and start not in apart:
            freed[first.storage] = start
        ran.update(computes)
        start += len(run)
    return Program(instructions=tuple(i for i in instructions if i is not None))


def _keeping_halves_apart(graph: StepGraph, program: Program) -> frozenset[int]:
    """Places of frees that are the only instructions between two halves of a call."""
    found: set[int] = set()
    first: int | None = None
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        if first is not None and are_halves(graph, program.instructions[first], instruction):
            found.update(range(first + 1, place))
        first = place
    return frozenset(found)


def _put_together(
    graph: StepGraph, run: Sequence[Instruction], start: int, ran: Collection[int], held: Collection[int]
) -> Iterator[tuple[int, Compute, Op]]:
    """Recomputed ops of a run that may put their first result together in a reused buffer: place, instruction, op."""
    passed_on = set(freed_in(run))
    for position, instruction in enumerate(run, start):
        if isinstance(instruction, Compute) and instruction.op in ran and instruction.over is None:
            op = graph.ops[instruction.op].later
            ours = not any(s in held or (op.by_slices and s in op.by_slices.sums) for s in op.writes)
            if op.by_slices and op.writes[0] not in passed_on and ours:
                yield position, instruction, op


def _more_bytes(graph: StepGraph, op: Op, instruction: Compute) -> int:
    """Extra bytes on top of the results if an op that runs whole ran in slices, less the workspace of its kernel."""
    slices = op.by_slices
    assert slices is not None
    nbytes = sum(slices.slice_bytes(s, graph.storages[s].nbytes) for s in op.writes)
    return nbytes + slices.workspace_bytes - op.run_workspace_bytes(instruction.chunks)


def _is_quicker(op: Op, instruction: Compute) -> bool:
    """Whether slices over a freed buffer take less time than the op takes now."""
    slices = op.by_slices
    assert slices is not None
    if instruction.sliced:
        return slices.copy_over_seconds < slices.copy_seconds
    return slices.seconds + slices.copy_over_seconds < op.run_seconds(instruction.chunks, in_place=False)
