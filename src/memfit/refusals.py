"""The words of a `BudgetError`: one budget, the one the user gave, and one least budget, with all that was missed.

A plan that takes more on the machine than predicted is made again for less. That lower target is the planner's affair:
an error that names it beside the user's budget contradicts itself, and may be below zero.
"""

from __future__ import annotations

from memfit.errors import BudgetError
from memfit.units import format_bytes

__all__ = ["refused"]


def refused(error: BudgetError, *, budget_bytes: int, missed_bytes: int = 0, measured_bytes: int = 0) -> BudgetError:
    """The error in terms of the user's budget.

    Args:
        error: of a planner, for the budget less what was missed.
        budget_bytes: what the user asked for.
        missed_bytes: what measured peaks are above predicted ones.
        measured_bytes: the lowest peak that was measured, 0 if none was; no lower budget is promised.

    Returns:
        An error whose text and numbers agree.
    """
    least_bytes = max(error.least_bytes + missed_bytes, measured_bytes)
    text = f"no plan fits {format_bytes(budget_bytes)}; the least budget that works is {format_bytes(least_bytes)} "
    text += f"({least_bytes} bytes)"
    text += f", set by {error.binding}" if error.binding else ""
    text += f"; measured peaks are {format_bytes(missed_bytes)} above predicted ones here" if missed_bytes else ""
    return BudgetError(text, budget_bytes=budget_bytes, least_bytes=least_bytes, binding=error.binding)
