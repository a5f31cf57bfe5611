"""The figures of a fitted module, as trainers log them."""

from __future__ import annotations

from torch import nn

from memfit.errors import MemfitError
from memfit.fitted.installation import fitted_call

__all__ = ["figures"]


def figures(model: nn.Module) -> dict[str, float]:
    """The predicted peak of the newest plan and the newest measured one in bytes, the overhead, and how many plans."""
    try:
        call = fitted_call(model)
    except MemfitError:  # not fitted, or no more
        return {}
    found = {"memfit/plans": float(len(call.plans))}
    if call.plans:
        plan = next(reversed(call.plans.values()))
        found |= {"memfit/peak_predicted": float(plan.predicted.peak_bytes), "memfit/overhead": plan.predicted.overhead}
        measured = [known.measured_peak_bytes for known in call.plans.values() if known.measured_peak_bytes is not None]
        if measured:  # a plan whose decisions are those of another is not run to be proved
            found["memfit/peak_measured"] = float(measured[-1])
    elif call.fitting.known:
        found["memfit/peak_predicted"] = float(next(reversed(call.fitting.known.values())).predicted_bytes)
    return found
