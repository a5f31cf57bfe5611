"""The check of the budget at the end of every search: no program above the budget passes it.

A search makes an order, and several steps then make a quicker program of it: variants, fused regions, buffer reuse,
halves side by side, transfers. Each of these steps estimates room by itself, so the simulator judges each step here,
and a step that takes the peak above the limit is undone (`within_limit`). The final program of a strategy is asserted
to be within the budget (`fitting`): a plan that exceeds the budget is a mistake of a planner and never run.

Known limits: a change is undone as a whole, also where a part of it would fit.
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
        program: the program that a strategy found.
        budget_bytes: limit of the peak.

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
