"""How far a tiled step may be from the baseline step: sums are made in another order, so results differ by rounding.

Rounding is measured, not guessed: the baseline step runs in float64 as well, and the distance of the baseline step in
float32 from it is the baseline step's own error. A tiled step may have four times that error: each tensor four times
its own error, or four times the relative error of all gradients together if that is more. Errors are norms over a
tensor; single elements scatter.

Known limits: where there is no wider step to compare with, the baseline step itself is the reference, a coarse one: for
float64, and where ops draw random numbers, since another dtype draws other numbers (`own_rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memfit.torch_compat.core import pytree

__all__ = ["in_float64", "in_widest", "is_within_rounding", "own_rounding"]

_TIMES = 4
"""Allowed multiple of the baseline step's own error."""

_WIDE = (torch.float64, torch.complex128)

_OF_FLOAT64 = 1e-12
"""Allowed error in float64, relative to all gradients together."""

_OTHER_STEP = 0.1
"""Two steps drew different random numbers if the relative distance of their gradients is larger than this."""

_OF_RANDOM = 1e3
"""Allowed error without a wider reference, in units in the last place of all gradients together."""

_OF_NARROW = 16
"""The same for a dtype of 16 bits, as autocast computes in."""


def in_float64(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its inputs, converted to float64."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        made = in_widest(tensor)
        return tensor if made is tensor else made.detach().requires_grad_(tensor.requires_grad)

    wide_args, wide_kwargs = pytree.tree_map_only(torch.Tensor, wide, (tuple(args), kwargs))
    return model._apply(in_widest), wide_args, wide_kwargs


def own_rounding(plain: Mapping[Any, torch.Tensor], wide: Mapping[Any, torch.Tensor]) -> float | None:
    """The relative distance of the baseline step's gradients, all together, from those in float64.

    Returns:
        None if the float64 step drew other random numbers, or if there are no gradients.
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
    """Whether a result differs from the baseline step's by rounding only.

    Args:
        plain: result of the baseline step.
        found: result of the tiled step.
        reference: result of the baseline step in float64; None if there is none.
        scale: norm of all gradients of the baseline step.
        own: see `own_rounding`. By chance, the error of a single tensor may be lower.
        computed_in: narrowest dtype that the result was computed in, if it differs from its own dtype.
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
    """The allowed relative distance of two steps where no wider step tells how far each is from the exact result."""
    if dtype in _WIDE:
        return _OF_FLOAT64
    info = torch.finfo(dtype)
    return (_OF_RANDOM if info.bits > 16 else _OF_NARROW) * info.eps


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((in_widest(a) - in_widest(b)).norm())


def in_widest(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the widest dtype of its kind; a tensor of integers is unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
