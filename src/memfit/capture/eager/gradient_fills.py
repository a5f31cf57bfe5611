"""Gradients of maxima, minima and clamps between tensors lie as eager makes them, while a graph is made.

The formula of such a gradient fills a tensor that it just made, in place, so the result lies as that tensor. Where
autograd meets tensors of a subclass, as in a trace, it fills a copy instead, and the copy is contiguous. Sums over it
then add in another order wherever the operands are permuted: other bits.

*Idea*: in these formulas the axes are put in the order in which they lie in memory, so that a contiguous copy of that
lies as what is filled, and back after it.

Known limits: the gradient of a maximum, minimum or median over all elements is contiguous in eager mode; a trace lays
it out as the data. The proof compares the bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import DispatchKey

from memfit.capture.eager.python_kernels import kernels_in_place, without_kernel

__all__ = ["fills_in_gradients"]

_FILL = torch.ops.aten.masked_fill.Scalar

_FILLING = ("Maximum", "Minimum", "Fmax", "Fmin", "Clamp")
"""How names of the autograd nodes begin whose formulas fill in place."""


def _filled(data: torch.Tensor, mask: torch.Tensor, value: float) -> Any:
    node = torch._C._current_autograd_node()
    axes = list(range(data.dim()))
    if node is not None and node.name().startswith(_FILLING):
        axes.sort(key=data.stride().__getitem__, reverse=True)
    with without_kernel(_FILL, DispatchKey.Autograd):
        if axes == sorted(axes):
            return _FILL(data, mask, value)
        places = [axes.index(axis) for axis in range(data.dim())]
        return _FILL(data.permute(axes), mask.expand_as(data).permute(axes), value).permute(places)


def fills_in_gradients() -> AbstractContextManager[None]:
    """While active, gradients whose formulas fill a tensor in place are traced such that they lie as that tensor."""
    return kernels_in_place({_FILL: _filled}, DispatchKey.Autograd)
