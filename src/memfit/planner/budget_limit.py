"""The budget at the end of every search: one place that no program above it passes.

A search makes an order, and several steps then make a quicker program of it: variants, fused regions, buffer reuse,
halves side by side, transfers. Each of them estimates room by itself, so each is judged by the simulator here and
undone where it takes the peak above the limit (`within_limit`). What a strategy hands out at last is asserted to be
within the budget (`fitting`): a plan that exceeds it is a mistake of a planner and never run.

Known limits: a change is undone whole, also where a part of it would fit.
"""

from __future__ import annotations

from memfit.errors import ProgramError
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program
from memfit.sim.simulator import Timeline, simulate
from memfit.units import format_bytes

__all__ = ["fitting", "within_limit"]


def fitting(graph: StepGraph, program: Program, budget_bytes: int) -> Timeline:
    """Simulates a program and checks that its peak is within a budget.

    Args:
        graph: the step.
        program: what a strategy found.
        budget_bytes: for the peak.

    Returns:
        Its timeline.

    Raises:
        ProgramError: if its peak exceeds the budget.
    """
    timeline = simulate(graph, program)
    if timeline.peak_bytes > budget_bytes:
        raise ProgramError(
            f"a planner returned a program of {format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes) for a "
            f"budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) at instruction {timeline.peak_position} of "
            f"{len(program.instructions)}; please report it, a plan like this is never run"
        )
    return timeline


def within_limit(graph: StepGraph, program: Program, changed: Program, limit_bytes: int) -> Program:
    """The changed program if its peak is within the limit or no higher than it was, else the program as it was."""
    if changed.instructions == program.instructions:
        return program
    peak_bytes = simulate(graph, changed).peak_bytes
    if peak_bytes <= limit_bytes or peak_bytes <= simulate(graph, program).peak_bytes:
        return changed
    return program
