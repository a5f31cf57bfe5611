"""How far a tiled step may be from the plain one: sums are made in another order, so results differ by rounding.

Rounding is measured, not guessed: the plain step is taken in float64 as well, and what the plain step in float32 is off
from that, a tiled step may be off four times: each tensor by four times its own error, or by four times the relative
error of all gradients together if that is more. Errors are norms over a tensor; single elements scatter.

Known limits: where there is no wider step to compare with, the plain step itself is the reference, a coarse one: for
float64, and where ops draw random numbers of which another dtype draws others (`own_rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["in_float64", "in_widest", "is_within_rounding", "own_rounding"]

_TIMES = 4
"""So many times the plain step's own error."""

_WIDE = (torch.float64, torch.complex128)

_OF_FLOAT64 = 1e-12
"""Relative to all gradients together."""

_OTHER_STEP = 0.1
"""Two steps whose gradients are so much apart, relatively, drew other random numbers."""

_OF_RANDOM = 1e3
"""So many units in the last place of all gradients together."""

_OF_NARROW = 16
"""So many of a dtype of 16 bits, as autocast computes in."""


def in_float64(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model, made float64, and its inputs likewise."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        made = in_widest(tensor)
        return tensor if made is tensor else made.detach().requires_grad_(tensor.requires_grad)

    wide_args, wide_kwargs = pytree.tree_map_only(torch.Tensor, wide, (tuple(args), kwargs))
    return model._apply(in_widest), wide_args, wide_kwargs


def own_rounding(plain: Mapping[Any, torch.Tensor], wide: Mapping[Any, torch.Tensor]) -> float | None:
    """How far the plain step's gradients, together, are from those in float64, relatively.

    Returns:
        None if they are not those of the same step but of one that drew other random numbers, or there are none.
    """
    if not wide or plain.keys() != wide.keys():
        return None
    apart = math.hypot(*(_distance(tensor, wide[name]) for name, tensor in plain.items()))
    whole = math.hypot(*(float(tensor.norm()) for tensor in wide.values()))
    return apart / whole if apart <= _OTHER_STEP * whole and whole else None


def is_within_rounding(
    plain: torch.Tensor,
    found: torch.Tensor,
    reference: torch.Tensor | None,
    *,
    scale: float,
    own: float,
    computed_in: torch.dtype | None = None,
) -> bool:
    """Whether a result differs from the plain step's by rounding only.

    Args:
        plain: of the plain step.
        found: of the tiled step.
        reference: of the plain step in float64; None if there is none.
        scale: norm of all gradients of the plain step.
        own: see `own_rounding`. By chance a single tensor may be nearer than that.
        computed_in: the narrowest dtype that it was computed in, if that is another than its own.
    """
    if plain.shape != found.shape or plain.dtype is not found.dtype or in_widest(plain).dtype not in _WIDE:
        return False
    eps = torch.finfo(plain.dtype).eps
    if reference is None:
        return _distance(found, plain) <= _share(computed_in or plain.dtype) * max(
            scale, float(in_widest(plain).norm())
        )
    least = max(eps, own) * float(in_widest(reference).norm())
    return _distance(found, reference) <= _TIMES * max(_distance(plain, reference), least)


def _share(dtype: torch.dtype) -> float:
    """How far a step may be from another, relatively, where no wider one tells how far each is from the truth."""
    if dtype in _WIDE:
        return _OF_FLOAT64
    info = torch.finfo(dtype)
    return (_OF_RANDOM if info.bits > 16 else _OF_NARROW) * info.eps


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((in_widest(a) - in_widest(b)).norm())


def in_widest(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the widest dtype of its kind; one of integers as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
