"""Whole or in parts: how each op of a program runs.

An op that runs in parts takes less memory and sometimes more time (`memfit.capture.parts`). Workspace is only
there while its op runs, so the choice is free at every instant: orders are planned with every op in its
leanest way, then each run gets the quickest way for which there is room where it stands. Ops that run as one
(`memfit.step.fusion`) run one by one where that is quicker and there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.step.graph import Op, StepGraph, Way
from memfit.step.program import Action, Instruction, Program, as_they_run, program_of
from memfit.step.simulate import simulate

__all__ = ["leanest", "program_within"]


def leanest(graph: StepGraph) -> StepGraph:
    """The step with every op in the way that takes the least memory."""
    return replace(graph, ops=tuple(_lean(op) for op in graph.ops))


def program_within(graph: StepGraph, order: Sequence[int], budget_bytes: int | None = None) -> Program:
    """The program of an order, every op in the quickest way that leaves the peak within a budget.

    Args:
        graph: the step.
        order: as for `program_of`.
        budget_bytes: for the peak; the lowest peak of the order if there is none or it is below that.

    Returns:
        The program.
    """
    lean = leanest(graph)
    program, apart = program_of(lean, order), program_of(lean, order, fuse=False)
    limit = max(budget_bytes or 0, simulate(lean, program).peak_bytes)
    alone = _one_by_one(graph, lean, apart, limit)

    instructions: list[Instruction] = []
    position, freed = 0, False
    for run in program.runs():
        computes = [i for i in run if i.action is Action.COMPUTE]
        if not computes:
            instructions.extend(() if freed else run)
            continue
        there = alone[position : position + len(computes)]
        position += len(computes)
        freed = len(run) == 1 or (
            all(op.peak_bytes <= limit for op in there)
            and sum(op.seconds for op in there) <= sum(_seconds_fused(graph, i) for i in computes)
        )
        instructions.extend(i for op in there for i in op.instructions) if freed else instructions.extend(run)
    return Program(instructions=tuple(instructions))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """An op that runs by itself, the quickest way for which there is room, and the frees after it."""

    instructions: tuple[Instruction, ...]
    peak_bytes: int
    seconds: float


def _one_by_one(graph: StepGraph, lean: StepGraph, program: Program, limit: int) -> list[_Alone]:
    """The ops of a program without fused ones."""
    instructions = program.instructions
    bytes_at = simulate(lean, program).bytes_at
    starts = [n for n, i in enumerate(instructions) if i.action is Action.COMPUTE]
    ops = as_they_run(lean, program.order())
    found: list[_Alone] = []
    for op, start, stop in zip(ops, starts, [*starts[1:], len(instructions)], strict=True):
        instruction = instructions[start]
        over = instruction.over
        room = limit - bytes_at[start] + op.workspace_bytes
        # Whole, an op that has parts cannot write over its operand, which then stays until it is done.
        beside = 0 if over is None else graph.storages[over].nbytes
        ways = [w for w in op.ways if w.workspace_bytes + (beside if w.parts == 1 else 0) <= room]
        best = min(ways, key=lambda way: way.seconds, default=op.way(op.parts))
        made = replace(instruction, parts=best.parts)
        frees = instructions[start + 1 : stop]
        if op.ways and best.parts == 1 and over is not None:
            made, frees = replace(made, over=None), (Instruction(Action.FREE, over), *frees)
        found.append(_Alone(instructions=(made, *frees), peak_bytes=bytes_at[start], seconds=best.seconds))
    return found


def _seconds_fused(graph: StepGraph, instruction: Instruction) -> float:
    slices = graph.ops[instruction.index].later.by_samples
    assert slices is not None
    return slices.seconds


def _lean(op: Op) -> Op:
    best = min(op.ways, key=_memory_then_time, default=None)
    if best is None:
        return op
    return replace(op, parts=best.parts, seconds=best.seconds, workspace_bytes=best.workspace_bytes)


def _memory_then_time(way: Way) -> tuple[int, float]:
    return way.workspace_bytes, way.seconds
