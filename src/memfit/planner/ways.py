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

    def quickest(instruction: Instruction, bytes_there: int) -> Instruction:
        if instruction.action is Action.FREE:
            return instruction
        op = lean.ops[instruction.index]
        room = limit - bytes_there + op.workspace_bytes
        ways = [w for w in op.ways if w.workspace_bytes <= room and (instruction.over is None or w.parts > 1)]
        best = min(ways, key=lambda way: way.seconds, default=None)
        return instruction if best is None else replace(instruction, parts=best.parts)

    return Program(
        instructions=tuple(map(quickest, program.instructions, timeline.bytes_at)),
    )


def _lean(op: Op) -> Op:
    best = min(op.ways, key=_memory_then_time, default=None)
    if best is None:
        return op
    return replace(op, parts=best.parts, seconds=best.seconds, workspace_bytes=best.workspace_bytes)


def _memory_then_time(way: Way) -> tuple[int, float]:
    return way.workspace_bytes, way.seconds
