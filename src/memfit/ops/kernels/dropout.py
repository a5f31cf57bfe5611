"""Dropout with a mask that was drawn before: the arithmetic of eager PyTorch, on any slice of the data."""

from __future__ import annotations

import math

import torch

from memfit.torch_compat.core import unset_fake_temporarily

__all__ = ["drawn", "kept_scale", "masked", "masked_over_data"]

_LIBRARY = torch.library.Library("memfit", "FRAGMENT")
_LIBRARY.define("drawn(Tensor like, float probability) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _draw(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(like).bernoulli_(probability)


def _fake_draw(like: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(like)


_LIBRARY.impl("drawn", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("memfit::drawn", _fake_draw, lib=_LIBRARY)

drawn = torch.ops.memfit.drawn.default
"""Draws zeros and ones in the layout of a tensor, in the order of an in-place draw over that tensor."""


def masked(data: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The data that dropout keeps, scaled; bit for bit the product of the data and the noise of dropout."""
    return data.mul(mask).mul_(data.new_tensor(scale))  # rounded as the data are


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
