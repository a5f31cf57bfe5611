"""Dropout with a mask that was drawn before: the arithmetic of eager PyTorch, on any slice of the data."""

from __future__ import annotations

import math

import torch

from memfit.ops.kernels.library import custom_op
from memfit.torch_compat.core import unset_fake_temporarily

__all__ = ["drawn", "kept_scale", "masked", "masked_over_data"]


def _fake_draw(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(like)


@custom_op(
    "drawn(Tensor like, float probability) -> Tensor", fake=_fake_draw, tags=(torch.Tag.nondeterministic_seeded,)
)
def drawn(like: torch.Tensor, probability: float) -> torch.Tensor:
    """Draws zeros and ones in the layout of a tensor, in the order of an in-place draw over that tensor."""
    return torch.empty_like(like).bernoulli_(probability)


@custom_op("masked(Tensor data, Tensor mask, float scale) -> Tensor", tags=(torch.Tag.pointwise,))
def masked(data: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The data that dropout keeps, scaled; bit for bit the product of the data and the noise of dropout."""
    return data.mul(mask).mul_(data.new_tensor(scale))  # rounded as the data are


@custom_op("masked_(Tensor(a!) data, Tensor mask, float scale) -> Tensor(a!)")
def masked_over_data(data: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Applies the mask as `masked` does, in place over the data."""
    return data.mul_(mask).mul_(data.new_tensor(scale))


def kept_scale(kept: float, data: torch.Tensor) -> float | None:
    """The noise of kept elements, as eager rounds it; None if it is not finite, since zeros would become NaN.

    A GPU multiplies by a reciprocal that it rounds once; a CPU rounds the probability first. So the device computes the
    noise.

    Args:
        kept: the probability to keep an element.
        data: operand of dropout, a fake tensor.
    """
    device = torch.device("cpu") if data.is_meta else data.device
    with unset_fake_temporarily():
        scale = float(torch.ones((), dtype=data.dtype, device=device).div_(kept))
    return scale if math.isfinite(scale) else None
