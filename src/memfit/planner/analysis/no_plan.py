"""The error of a search that found no plan: the least budget, and the op that determines it.

The op at the peak of the leanest program known, its module and the widest tensor alive with it show where a smaller
model, batch or image would help.

Known limits: a step graph knows modules, not lines of the user's code.
"""

from __future__ import annotations

from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program
from memfit.planner.analysis.explain import binding_place
from memfit.refusals import refusal
from memfit.sim.simulator import simulate

__all__ = ["no_plan"]


def no_plan(
    graph: StepGraph,
    program: Program,
    budget_bytes: int,
    *,
    least_bytes: int | None = None,
    subject: str = "plan",
    advice: str = "",
) -> BudgetError:
    """The error, in terms of the leanest program known.

    Args:
        graph: the step.
        program: the program of the least peak that was found.
        budget_bytes: the budget that the program exceeds.
        least_bytes: the least budget that works; None for the program's peak.
        subject: see `memfit.refusals.refusal`.
        advice: see `memfit.refusals.refusal`.
    """
    timeline = simulate(graph, program)
    return refusal(
        budget_bytes=budget_bytes,
        least_bytes=timeline.peak_bytes if least_bytes is None else least_bytes,
        binding=binding_place(graph, program, timeline),
        subject=subject,
        advice=advice,
    )
