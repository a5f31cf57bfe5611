"""memfit makes a PyTorch training step fit the available memory: one budget in bytes, the same gradients.

Names are imported at first use, so that `memfit.ir`, `memfit.sim`, `memfit.planner` and `memfit.strategies` can be used
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.api import Estimate as Estimate
    from memfit.api import Measurement as Measurement
    from memfit.api import Plan as Plan
    from memfit.api import compare as compare
    from memfit.api import effective_batch as effective_batch
    from memfit.api import estimate as estimate
    from memfit.api import fit as fit
    from memfit.api import max_batch as max_batch
    from memfit.api import max_size as max_size
    from memfit.api import measure as measure
    from memfit.api import plan as plan
    from memfit.api import plan_of as plan_of
    from memfit.api import release as release
    from memfit.errors import BudgetError as BudgetError
    from memfit.errors import CaptureError as CaptureError
    from memfit.errors import ExactnessError as ExactnessError
    from memfit.errors import MemfitError as MemfitError
    from memfit.errors import OutOfMemoryError as OutOfMemoryError
    from memfit.errors import PipelineError as PipelineError
    from memfit.errors import PlanFileError as PlanFileError
    from memfit.errors import PlanMismatchError as PlanMismatchError
    from memfit.errors import SecondDerivativeError as SecondDerivativeError
    from memfit.errors import SpecError as SpecError
    from memfit.pipelining.api import pipeline as pipeline
    from memfit.pipelining.pipeline import Pipeline as Pipeline

__version__ = "0.1.0"

_MODULE_OF = {
    "fit": "memfit.api",
    "plan": "memfit.api",
    "release": "memfit.api",
    "estimate": "memfit.api",
    "measure": "memfit.api",
    "max_batch": "memfit.api",
    "effective_batch": "memfit.api",
    "max_size": "memfit.api",
    "compare": "memfit.api",
    "plan_of": "memfit.api",
    "pipeline": "memfit.pipelining.api",
    "Pipeline": "memfit.pipelining.pipeline",
    "Plan": "memfit.api",
    "Estimate": "memfit.api",
    "Measurement": "memfit.api",
    "BudgetError": "memfit.errors",
    "CaptureError": "memfit.errors",
    "ExactnessError": "memfit.errors",
    "MemfitError": "memfit.errors",
    "OutOfMemoryError": "memfit.errors",
    "PipelineError": "memfit.errors",
    "PlanFileError": "memfit.errors",
    "PlanMismatchError": "memfit.errors",
    "SecondDerivativeError": "memfit.errors",
    "SpecError": "memfit.errors",
}
"""The module that defines each public name."""

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
