"""The correction of a plan that took more memory than its budget when it ran.

As in any closed loop, the error of the prediction is subtracted from the planner's budget, and the next plan is
measured again. One step and each device of a pipeline are corrected alike.
"""

from __future__ import annotations

__all__ = ["MOST_PLANS", "lowered"]

MOST_PLANS = 4
"""The number of plans that are made and measured before the budget is refused."""


def lowered(target_bytes: int, budget_bytes: int, *, measured_bytes: int, predicted_bytes: int) -> int:
    """The budget of the next plan, after a plan made for `target_bytes` took more than `budget_bytes`.

    The excess of a plan over its prediction is subtracted from the user's budget, once. It is not subtracted from the
    last target, which is lowered already by the excess of earlier plans.
    """
    return min(target_bytes - (measured_bytes - budget_bytes), budget_bytes - (measured_bytes - predicted_bytes))
