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

import math
from contextlib import AbstractContextManager

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memfit.capture.eager.python_kernels import kernels_in_place

__all__ = ["draws_laid_out", "drawn", "kept_scale", "masked", "masked_over_data"]

_aten = torch.ops.aten

_LIBRARY = torch.library.Library("memfit", "FRAGMENT")
_LIBRARY.define("drawn(Tensor like, float probability) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _draw(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(like).bernoulli_(probability)


def _fake_draw(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(like)


_LIBRARY.impl("drawn", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("memfit::drawn", _fake_draw, lib=_LIBRARY)

drawn = torch.ops.memfit.drawn.default
"""Zeros and ones, laid out as a tensor is, in the order in which an in-place draw over it takes its numbers."""


def draws_laid_out() -> AbstractContextManager[None]:
    """While active, in-place draws of zeros and ones keep the layout of what they fill."""
    return kernels_in_place({_aten.bernoulli_.float: _draw_over}, DispatchKey.Autograd)


def _draw_over(data: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    if generator is not None:
        return data.copy_(_aten.bernoulli.p(data, p, generator=generator))
    return data.copy_(drawn(data.detach(), p))


def masked(data: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The data that dropout keeps, scaled, with the bits of the product with its noise."""
    return data.mul(mask).mul_(data.new_tensor(scale))  # rounded as the data are


def masked_over_data(data: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The same, written over the data."""
    return data.mul_(mask).mul_(data.new_tensor(scale))


def kept_scale(kept: float, data: torch.Tensor) -> float | None:
    """The noise where data is kept, as eager rounds it; None where it has no finite value, and zeros would become NaN.

    A GPU multiplies by a reciprocal that it rounds once; a CPU rounds what is kept first, so the device is asked.

    Args:
        kept: the probability to keep an element.
        data: what is dropped out, fake.
    """
    device = torch.device("cpu") if data.is_meta else data.device
    with unset_fake_temporarily():
        scale = float(torch.ones((), dtype=data.dtype, device=device).div_(kept))
    return scale if math.isfinite(scale) else None
