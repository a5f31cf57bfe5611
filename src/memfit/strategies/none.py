"""No strategy: every op runs once, every result stays until its last use. This is the step as it is without memfit."""

from __future__ import annotations

from memfit.ir.graph import StepGraph
from memfit.ir.program import baseline_order

__all__ = ["order"]


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """The captured order; ignores the budget."""
    return baseline_order(graph)
