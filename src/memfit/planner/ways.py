"""Whole or in parts: how each op of a program runs.

An op that runs in parts takes less memory and sometimes more time (`memfit.capture.parts`). Workspace is only
there while its op runs, so the choice is free at every instant: orders are planned with every op in its
leanest way, then each run gets the quickest way for which there is room where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.step.graph import Op, StepGraph, Way
from memfit.step.program import Action, Instruction, Program, program_of
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
    program = program_of(lean, order)
    timeline = simulate(lean, program)
    limit = max(budget_bytes or 0, timeline.peak_bytes)

    instructions: list[Instruction] = []
    for instruction, bytes_there in zip(program.instructions, timeline.bytes_at, strict=True):
        if instruction.action is Action.FREE:
            instructions.append(instruction)
            continue
        op, over = lean.ops[instruction.index], instruction.over
        room = limit - bytes_there + op.workspace_bytes
        # Whole, an op that has parts cannot write over its operand, which then stays until it is done.
        beside = 0 if over is None else graph.storages[over].nbytes
        ways = [w for w in op.ways if w.workspace_bytes + (beside if w.parts == 1 else 0) <= room]
        best = min(ways, key=lambda way: way.seconds, default=None)
        if best is not None and best.parts == 1 and over is not None:
            instructions += [replace(instruction, parts=1, over=None), Instruction(Action.FREE, over)]
        else:
            instructions.append(instruction if best is None else replace(instruction, parts=best.parts))
    return Program(instructions=tuple(instructions))


def _lean(op: Op) -> Op:
    best = min(op.ways, key=_memory_then_time, default=None)
    if best is None:
        return op
    return replace(op, parts=best.parts, seconds=best.seconds, workspace_bytes=best.workspace_bytes)


def _memory_then_time(way: Way) -> tuple[int, float]:
    return way.workspace_bytes, way.seconds
