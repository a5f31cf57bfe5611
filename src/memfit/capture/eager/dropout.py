"""Dropout as eager PyTorch runs it, while a graph is made.

Eager dropout fills noise laid out like the data with zeros and ones, divides it by what is kept, in the data's type,
and multiplies. Where a GPU has a kernel for all of that it runs it (`native_dropout`). Under the Python dispatcher
AOTAutograd traces `native_dropout` on every device, and its CPU kernel multiplies by `1 / (1 - p)` instead: other bits
at most p in half precision, at some in float32. So torch's Python kernel of dropout is put aside, and eager's own
composite is traced, of attention as well.

An in-place draw becomes a functional one, whose kernel fills memory in the order of axes, not in that of the data it
stood for. It gets an op of its own, `memfit::drawn`, with the layout of eager's noise and so its numbers.

Then the noise is taken apart: a mask of a byte an element is kept, and each product with the noise is `masked`, with
the same bits. Eager keeps the noise itself.

Known limits: noise that is used otherwise than to multiply data of its shape and type (alpha dropout) stays as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._C import DispatchKey

from memfit.capture.eager.python_kernels import kernels_in_place
from memfit.ops.kernels.dropout import drawn

__all__ = ["draws_laid_out"]

_aten = torch.ops.aten


def draws_laid_out() -> AbstractContextManager[None]:
    """While active, in-place draws of zeros and ones keep the layout of what they fill."""
    return kernels_in_place({_aten.bernoulli_.float: _draw_over}, DispatchKey.Autograd)


def _draw_over(data: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    if generator is not None:
        return data.copy_(_aten.bernoulli.p(data, p, generator=generator))
    return data.copy_(drawn(data.detach(), p))
