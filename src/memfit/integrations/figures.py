"""The figures of a fitted module, as trainers log them."""

from __future__ import annotations

from torch import nn

from memfit.errors import MemfitError
from memfit.fitted.installation import fitted_call

__all__ = ["figures"]


def figures(model: nn.Module) -> dict[str, float]:
    """The predicted and measured peak of the newest plan in bytes, its overhead, and the number of plans."""
    try:
        call = fitted_call(model)
    except MemfitError:  # not fitted, or no more
        return {}
    found = {"memfit/plans": float(len(call.plans))}
    if call.plans:
        plan = next(reversed(call.plans.values()))
        found |= {"memfit/peak_predicted": float(plan.predicted.peak_bytes), "memfit/overhead": plan.predicted.overhead}
        if plan.measured_peak_bytes is not None:
            found["memfit/peak_measured"] = float(plan.measured_peak_bytes)
    elif call.fitting.known:
        found["memfit/peak_predicted"] = float(next(reversed(call.fitting.known.values())).predicted_bytes)
    return found
