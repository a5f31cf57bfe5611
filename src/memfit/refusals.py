"""The words of a `BudgetError`: one budget, the one the user gave, one least budget, what sets it, and what to do.

A plan that takes more on the machine than predicted is made again for less. That lower target is the planner's affair:
an error that names it beside the user's budget contradicts itself, and may be below zero. So an error is made of facts
(`refusal`), and one that turns out to be about another budget is made anew of the same facts (`refused`).

Known limits: pipelines have a budget a device, which `memfit.pipelining` words itself.
"""

from __future__ import annotations

from memfit.errors import BudgetError
from memfit.units import format_bytes

__all__ = ["advised", "refusal", "refused"]


def refusal(
    *,
    budget_bytes: int,
    least_bytes: int,
    binding: str = "",
    subject: str = "plan",
    missed_bytes: int = 0,
    advice: str = "",
) -> BudgetError:
    """The error of a budget that is too small.

    Args:
        budget_bytes: what the user asked for.
        least_bytes: the least budget that works.
        binding: module, op and tensors that set it.
        subject: what does not fit, such as `"order of strategy 'rotor'"`.
        missed_bytes: what measured peaks are above predicted ones.
        advice: what else there is to do, beside asking for the least budget.
    """
    text = f"no {subject} fits {format_bytes(budget_bytes)}; "
    text += f"the least budget that works is {format_bytes(least_bytes)} ({least_bytes} bytes)"
    text += f", set by {binding}" if binding else ""
    text += f"; measured peaks are {format_bytes(missed_bytes)} above predicted ones here" if missed_bytes else ""
    text += f"; {advice}" if advice else ""
    return BudgetError(
        text,
        budget_bytes=budget_bytes,
        least_bytes=least_bytes,
        binding=binding,
        subject=subject,
        advice=advice,
    )


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
    return refusal(
        budget_bytes=budget_bytes,
        least_bytes=max(error.least_bytes + missed_bytes, measured_bytes),
        binding=error.binding,
        subject=error.subject,
        missed_bytes=missed_bytes,
        advice=error.advice,
    )


def advised(error: BudgetError, advice: str) -> BudgetError:
    """The same error, which names one more thing to do."""
    return BudgetError(
        f"{error}; {advice}",
        budget_bytes=error.budget_bytes,
        least_bytes=error.least_bytes,
        binding=error.binding,
        subject=error.subject,
        advice=f"{error.advice}; {advice}" if error.advice else advice,
    )
