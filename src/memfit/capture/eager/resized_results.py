"""Results that take more memory than their elements, because their kernel resizes them and resizing frees nothing.

- `im2col` and `col2im` make their result as large as their operand: folded columns take as much memory as the columns.
- `mse_loss`, `smooth_l1_loss`, `binary_cross_entropy` and `soft_margin_loss` compute all elements in the memory of
  their result, and resize it to the one number they return.

Fake kernels do not do so. Which losses do is asked of the kernel, with two elements along each axis: it depends on the
device and on the release of torch.

Known limits: results on the meta device that are not fake tensors take the memory of their elements only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memfit.capture.eager.kernel_samples import kernels_only
from memfit.torch_compat.core import OpOverload, pytree

__all__ = ["elements_before_resizing"]

_AS_OPERAND = (torch.ops.aten.im2col.default, torch.ops.aten.col2im.default)
_SAMPLE = 2
_REFUSALS = (RuntimeError, IndexError, ValueError)
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)


def elements_before_resizing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """The number of elements that the kernel gives its result before it resizes it; 0 if it resizes nothing."""
    if func in _AS_OPERAND:
        return args[0].numel()
    if not _has_reduction(func):
        return 0
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(type(size) is not int for t in tensors for size in t.shape):
        return 0
    if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
        return 0
    try:
        whole = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return 0  # no loss of each element
    if not _is_resized(func, spec, tuple(_sample(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)):
        return 0
    return int(whole.numel())


def _sample(tensor: torch.Tensor) -> _Sample:
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    return _Sample(tuple(min(size, _SAMPLE) for size in tensor.shape), tensor.dtype, device)


class _Sample(NamedTuple):
    """The properties of a small operand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> torch.Tensor:
        """The operand; one half is a valid probability."""
        return torch.full(self.shape, 0.5 if self.dtype.is_floating_point else 0, dtype=self.dtype, device=self.device)


@functools.cache
def _is_resized(func: OpOverload, spec: pytree.TreeSpec, leaves: tuple[Any, ...]) -> bool:
    """Whether a real call returns one number in a larger storage."""
    try:
        with kernels_only():
            args, kwargs = pytree.tree_unflatten([x.made() if isinstance(x, _Sample) else x for x in leaves], spec)
            result = func(*args, **kwargs)
    except _REFUSALS:
        return False  # it cannot take a sample, or the device is not here
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        return False
    return bool(result.untyped_storage().nbytes() > result.element_size())


@functools.cache
def _has_reduction(func: Any) -> bool:
    return isinstance(func, OpOverload) and any(a.name == "reduction" for a in func._schema.arguments)
