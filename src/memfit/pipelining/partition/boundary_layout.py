"""The layout of tensors that cross a cut, and of gradients with other strides than their tensors.

Kernels depend on strides, so a gradient must have the same layout as without the cut. A compiled backward pass takes
gradients in the layout of the stage's results. If the two layouts differ (because of a transposition between two
layers, for example), a stage returns its result flat, as one row in memory order, takes the gradient as such a row, and
reads the row in the order of the gradient's layout. Both are views, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["flattened", "in_memory_order", "is_dense", "same_layout"]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor fills its memory without gaps and overlaps, in any order of its axes."""
    expected = 1
    for axis in sorted((a for a in range(len(shape)) if shape[a] != 1), key=lambda a: stride[a]):
        if stride[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides of a shape give the same places in memory."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one row, which every backend can send."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flattened(tensor: torch.Tensor, gradient_stride: Sequence[int]) -> torch.Tensor:
    """A dense tensor as one row in memory order; its gradient, also a row, is read in the order of other strides."""
    flat: torch.Tensor = _Flattened.apply(tensor, _outermost_first(gradient_stride))
    return flat


class _Flattened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: list[int]) -> torch.Tensor:
        ctx.axes, ctx.sizes = axes, [tensor.shape[axis] for axis in axes]
        return tensor.permute(_outermost_first(tensor.stride())).view(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = sorted(range(len(ctx.axes)), key=lambda place: ctx.axes[place])
        return gradients[0].view(ctx.sizes).permute(back), None


def _outermost_first(stride: Sequence[int]) -> list[int]:
    return sorted(range(len(stride)), key=lambda axis: -stride[axis])
