"""Error types of memfit. A message states the fact, the values and what to do."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CaptureError",
    "ExactnessError",
    "LossError",
    "MemfitError",
    "OutOfMemoryError",
    "PipelineError",
    "PlanFileError",
    "PlanMismatchError",
    "ProgramError",
    "SecondDerivativeError",
    "SpecError",
    "SwapError",
]


class MemfitError(Exception):
    """Base of every error raised here."""


class SpecError(MemfitError, ValueError):
    """An argument cannot be understood: a budget, a strategy name, a model name."""


class BudgetError(MemfitError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked for.
        least_bytes: the least budget that works; `budget=error.least_bytes` succeeds.
        binding: module, op and live tensors that set it.
        subject: what does not fit: a plan, or what a named strategy makes.
        advice: what else there is to do, beside asking for the least budget; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        least_bytes: int,
        binding: str = "",
        subject: str = "plan",
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.binding = binding
        self.subject = subject
        self.advice = advice


class CaptureError(MemfitError):
    """The model cannot be captured as a step graph."""


class ExactnessError(CaptureError):
    """The planned step does not have the bits of the plain step; names the tensors, the first op that differs."""


class LossError(CaptureError):
    """The loss cannot be called with the model's outputs; names its line."""


class PlanMismatchError(MemfitError):
    """A plan was made for another model, shape, dtype, device or torch."""


class SecondDerivativeError(MemfitError, RuntimeError):
    """A planned step is differentiated twice."""


class PlanFileError(MemfitError):
    """A plan file is damaged or not a plan file."""


class ProgramError(MemfitError):
    """A program breaks a rule of the step; a bug in a planner or a damaged plan."""


class OutOfMemoryError(MemfitError, RuntimeError):
    """A fitted step ran out of memory; names the shape, the plan and the live tensors."""


class SwapError(MemfitError, RuntimeError):
    """Swapped tensors cannot be stored or brought back: no room on the tier, or a failing disk."""


class PipelineError(MemfitError, RuntimeError):
    """Another process of the pipeline failed, or cannot run the plan; names it and its error."""
