"""Dropout as eager PyTorch runs it, while a graph is made.

Eager dropout fills a noise tensor, laid out like the data, with zeros and ones, divides the noise by the keep
probability in the data's dtype, and multiplies the data by it. Where a GPU has one kernel for all of this, eager
dropout runs that kernel (`native_dropout`). Under the Python dispatcher AOTAutograd traces `native_dropout` on every
device, and its CPU kernel multiplies by `1 / (1 - p)` instead: the bits differ for most p in half precision, for some p
in float32. So torch's Python kernel of dropout is disabled, and eager's own composite is traced, also for attention.

Tracing turns an in-place draw into a functional op, whose kernel fills memory in the order of the axes, not in the
memory order of the data. So the draw gets its own op, `memfit::drawn`, with the layout of eager's noise and therefore
the same numbers.

Then the noise is replaced: a mask of one byte per element is saved, and each product with the noise becomes `masked`,
with the same bits. Eager PyTorch saves the noise itself.

Known limits: noise that does more than multiply data of its shape and dtype (alpha dropout) stays as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from memfit.capture.eager.python_kernels import kernels_in_place
from memfit.ops.kernels.dropout import drawn
from memfit.torch_compat.core import DispatchKey

__all__ = ["draws_laid_out"]

_aten = torch.ops.aten


def draws_laid_out() -> AbstractContextManager[None]:
    """While active, in-place draws of zeros and ones keep the layout of the tensor that they fill."""
    return kernels_in_place({_aten.bernoulli_.float: _draw_over}, DispatchKey.Autograd)


def _draw_over(data: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    if generator is not None:
        return data.copy_(_aten.bernoulli.p(data, p, generator=generator))
    return data.copy_(drawn(data.detach(), p))
