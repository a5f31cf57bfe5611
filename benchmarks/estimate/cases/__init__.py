"""Training steps whose memory is estimated: each block, loss and loop that memory models tend to get wrong.

Every step is large enough (8 MiB and more of activations) that a percent of it is not a rounding of small allocations.
A family of steps has a file.

Known limits: each step is one of its kind, so that a ratio says nothing of other sizes of it.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.estimate.cases import blocks, convolutional, losses, optimizers, precision, sequences, weights
from benchmarks.estimate.cases.step import Step

__all__ = ["CASES", "Step"]

_FAMILIES = (convolutional, weights, sequences, losses, blocks, precision, optimizers)

CASES: dict[str, Callable[[], Step]] = {
    made.__name__.replace("_", " "): made for family in _FAMILIES for made in family.CASES
}
"""By name."""
