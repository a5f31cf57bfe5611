"""Error types of memfit. A message states the fact, the values and a remedy."""

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
    """Base class of every error that memfit raises."""


class SpecError(MemfitError, ValueError):
    """An argument cannot be understood: a budget, a strategy name, a model name."""


class BudgetError(MemfitError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: the requested budget.
        least_bytes: the least budget that works; `budget=error.least_bytes` succeeds.
        binding: module, op and live tensors that set the least budget.
        subject: the object that does not fit: a plan, or the result of a named strategy.
        missed_bytes: how far measured peaks were above predicted ones; the least budget contains it.
        advice: a remedy in addition to the least budget; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        least_bytes: int,
        binding: str = "",
        subject: str = "plan",
        missed_bytes: int = 0,
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.missed_bytes = missed_bytes
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.binding = binding
        self.subject = subject
        self.advice = advice


class CaptureError(MemfitError):
    """The model cannot be captured as a step graph."""


class ExactnessError(CaptureError):
    """The planned step and the baseline step differ in bits; names the tensors and the first op that differs."""


class LossError(CaptureError):
    """The loss cannot be called with the model's outputs; names the line of the loss."""


class PlanMismatchError(MemfitError):
    """A plan was made for another model, shape, dtype, device or torch version."""


class SecondDerivativeError(MemfitError, RuntimeError):
    """A planned step is differentiated twice."""


class PlanFileError(MemfitError):
    """A plan file is damaged or not a plan file."""


class ProgramError(MemfitError):
    """A program violates a rule of the step; the cause is a bug in a planner or a damaged plan."""


class OutOfMemoryError(MemfitError, RuntimeError):
    """A fitted step ran out of memory; names the shape, the plan and the live tensors."""


class SwapError(MemfitError, RuntimeError):
    """Tensors cannot be swapped out or in: the tier has no room, or the disk fails."""


class PipelineError(MemfitError, RuntimeError):
    """Another process of the pipeline failed, or cannot run the plan; names the process and its error."""
