"""Lays out gradients of maxima, minima and clamps between tensors as eager mode does, while a graph is made.

The formula of such a gradient makes a tensor and fills it in place, so the result has the layout of that tensor. For
tensors of a subclass, as in a trace, autograd fills a copy instead, and the copy is contiguous. Where the operands are
permuted, sums over the gradient then add in another order, with different bits.

*Idea*: these formulas permute the axes into their memory order, so that a contiguous copy has the layout of the filled
tensor, and permute them back after the fill.

Known limits: the gradient of a maximum, minimum or median over all elements is contiguous in eager mode; a trace lays
it out like the data. The proof compares the bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.capture.eager.python_kernels import kernels_in_place, without_kernel
from memfit.torch_compat.core import DispatchKey, current_autograd_node

__all__ = ["fills_in_gradients"]

_FILL = torch.ops.aten.masked_fill.Scalar

_FILLING = ("Maximum", "Minimum", "Fmax", "Fmin", "Clamp")
"""Prefixes of the names of autograd nodes whose formulas fill in place."""


def _filled(data: torch.Tensor, mask: torch.Tensor, value: float) -> Any:
    node = current_autograd_node()
    axes = list(range(data.dim()))
    if node is not None and node.name().startswith(_FILLING):
        axes.sort(key=data.stride().__getitem__, reverse=True)
    with without_kernel(_FILL, DispatchKey.Autograd):
        if axes == sorted(axes):
            return _FILL(data, mask, value)
        places = [axes.index(axis) for axis in range(data.dim())]
        return _FILL(data.permute(axes), mask.expand_as(data).permute(axes), value).permute(places)


def fills_in_gradients() -> AbstractContextManager[None]:
    """While active, gradients whose formulas fill a tensor in place are traced with the layout of that tensor."""
    return kernels_in_place({_FILL: _filled}, DispatchKey.Autograd)
