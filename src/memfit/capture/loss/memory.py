"""The memory of a loss: while the loss runs, during the backward pass, and beyond the step.

Bytes are counted as the loss creates them, mostly on fake tensors. Three cases are not obvious:

- The number a loss returns may sit in a storage of the size of its operand. PyTorch's kernels of `mse_loss`,
  `smooth_l1_loss`, `binary_cross_entropy` and `soft_margin_loss` resize their full result to one number, and resizing
  frees no memory. The storage stays as long as the loss is referenced, so through the backward pass. Fake kernels do
  not do so; the real op is tried on a sample of two elements along each axis.
- The gradient of the loss itself, from which `backward` starts, lives until `backward` ends.
- A loss may keep tensors beyond the step: a centre, a queue, the last output. These tensors exist in each later step.

Known limits: memory that a kernel takes only while it runs (the backward of `soft_margin_loss`: two tensors) is not
counted; the proving run corrects for it. Only ops with a reduction are tried on a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.capture.allocation_tracker import LiveBytes
from memfit.torch_compat.core import OpOverload, pytree, storage_references, unset_fake_temporarily

__all__ = ["LossBytes", "uses"]

_SAMPLE = 2


class LossBytes(LiveBytes):
    """Counts as `LiveBytes` does, but storages of reduced results with the size that the kernel leaves them."""

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__(device_type)
        self._left: dict[tuple[Any, ...], bool] = {}
        self._whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op; see `LiveBytes`."""
        self._whole = self._whole_bytes(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _nbytes(self, tensor: torch.Tensor) -> int:
        own = super()._nbytes(tensor)
        return max(own, self._whole) if tensor.numel() == 1 else own

    def _whole_bytes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        """Bytes of a result of one number if its storage stays as large as the op's operands; else 0."""
        if not isinstance(func, OpOverload) or not any(a.name == "reduction" for a in func._schema.arguments):
            return 0
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors or max(t.numel() for t in tensors) < 2:
            return 0
        constants = [a for a in pytree.tree_leaves((args, kwargs)) if not isinstance(a, torch.Tensor)]
        key = (func, tuple((t.dim(), t.dtype) for t in tensors), repr(constants))
        if key not in self._left:
            self._left[key] = _keeps_its_size(func, args, kwargs)
        if not self._left[key]:
            return 0
        try:
            shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        except RuntimeError:
            shape = max(tensors, key=torch.numel).shape
        return int(shape.numel()) * tensors[0].element_size()


def uses(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """By storage, the number of tensors that refer to it, and its bytes; empty if torch cannot count references."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    counted = {key: (storage_references(storage), int(storage.nbytes())) for key, storage in storages.items()}
    return {key: (count, nbytes) for key, (count, nbytes) in counted.items() if count is not None}


def _keeps_its_size(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a real call on two elements along each axis returns one number in a larger storage."""

    def sample(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        device = "cpu" if value.device.type == "meta" else value.device
        shape = [min(size, _SAMPLE) for size in value.shape]
        if value.dtype.is_floating_point:
            return torch.full(shape, 0.5, dtype=value.dtype, device=device)
        return torch.zeros(shape, dtype=value.dtype, device=device)

    try:
        with unset_fake_temporarily(), torch.no_grad():
            result = func(*pytree.tree_map(sample, args), **pytree.tree_map(sample, kwargs))
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return False  # it cannot take a sample, so it is no elementwise loss
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        return False
    return bool(result.untyped_storage().nbytes() > result.element_size())
