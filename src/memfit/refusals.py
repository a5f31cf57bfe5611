"""The text of a `BudgetError`: the user's budget, the least budget, the op and tensors that set it, and a remedy.

If a plan takes more memory on the machine than predicted, memfit plans again for a lower target. That target is
internal to the planner: an error that names it next to the user's budget contradicts itself, and the target may be
below zero. So an error is built from facts (`refusal`), and an error about another budget is rebuilt from the same
facts (`refused`).

Known limits: pipelines have one budget per device; `memfit.pipelining` writes the text of those errors itself.
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
    """Builds the error of a budget that is too small.

    Args:
        budget_bytes: the user's budget.
        least_bytes: the least budget that works.
        binding: module, op and tensors that set the least budget.
        subject: the object that does not fit, such as `"order of strategy 'rotor'"`.
        missed_bytes: how far measured peaks are above predicted ones.
        advice: a remedy in addition to the least budget.
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
        missed_bytes=missed_bytes,
        advice=advice,
    )


def refused(error: BudgetError, *, budget_bytes: int, missed_bytes: int = 0) -> BudgetError:
    """Rebuilds an error in terms of the user's budget.

    Args:
        error: of a planner, for the budget minus `missed_bytes`.
        budget_bytes: the user's budget.
        missed_bytes: how far measured peaks are above predicted ones.

    Returns:
        An error whose text and numbers agree.
    """
    return refusal(
        budget_bytes=budget_bytes,
        least_bytes=error.least_bytes + missed_bytes,
        binding=error.binding,
        subject=error.subject,
        missed_bytes=missed_bytes,
        advice=error.advice,
    )


def advised(error: BudgetError, advice: str) -> BudgetError:
    """The same error with one more remedy."""
    return BudgetError(
        f"{error}; {advice}",
        budget_bytes=error.budget_bytes,
        least_bytes=error.least_bytes,
        binding=error.binding,
        subject=error.subject,
        missed_bytes=error.missed_bytes,
        advice=f"{error.advice}; {advice}" if error.advice else advice,
    )
