"""What distinguishes two calls of a module: a plan is made for one signature and never run on another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.capture.kernel_settings import kernel_settings

__all__ = ["Signature", "signature"]

Signature = tuple[Any, ...]


def signature(model: nn.Module, args: Any, kwargs: Any) -> Signature:
    """What a plan depends on and a caller may change.

    Shapes, dtypes, autocast, gradients that exist; and what chooses kernels, since that an op gives the same bits in
    parts was found with these.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = tuple(
        (t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, torch.Tensor) else _told(t) for t in leaves
    )
    device = next((t.device.type for t in leaves if isinstance(t, torch.Tensor)), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    seen: dict[int, int] = {}
    same = tuple(seen.setdefault(id(t), i) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor))
    accumulating = any(p.grad is not None for p in model.parameters())
    return (*inputs, same, autocast, accumulating, kernel_settings(device))


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _told(value: object) -> object:
    """Itself, or words for a number that equals others (`1`, `True`) or not itself (NaN); else its type."""
    if not _plain(value):
        return type(value)
    return value if value is None or isinstance(value, str) else (type(value), repr(value))
