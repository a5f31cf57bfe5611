"""Counts the bytes of live storages, real or fake, as ops create them.

A storage is counted from the op that returns it until its finalizer runs; the count is exact on a reference-counting
allocator. Kernel workspace is not visible here; `memfit.profiling.memory` sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch

from memfit.torch_compat.core import TorchDispatchMode

__all__ = ["LiveBytes", "parts_of", "tensors_in"]


class LiveBytes(TorchDispatchMode):
    """While active, `live` and `peak` count storages created since it was entered, on one device type."""

    # Without this flag Dynamo refuses to trace under the mode. The mode only observes ops.
    is_infra_mode = classmethod(lambda cls: True)
    supports_higher_order_operators = True  # random ops that are replayed

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.live = 0
        self.peak = 0
        self._seen: dict[int, int] = {}  # bytes by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs)) if _has_storage(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((result,)):
            if _has_storage(tensor):
                self._count(tensor, operands)
        return result

    def _count(self, tensor: torch.Tensor, operands: set[int]) -> None:
        if self.device_type is not None and tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            grown = max(0, int(storage.nbytes()) - self._seen[key])  # by resizing
        elif key in operands:
            return
        else:
            self._seen[key], grown = 0, self._nbytes(tensor)
            weakref.finalize(storage, self._gone, key)
        self._seen[key] += grown
        self.live += grown
        self.peak = max(self.peak, self.live)

    def _nbytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the storage of a result."""
        return int(tensor.untyped_storage().nbytes())

    def _gone(self, key: int) -> None:
        self.live -= self._seen.pop(key)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in arguments or results of an op, also in tuples, lists and dicts; quicker than a pytree."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def _has_storage(value: Any) -> bool:
    """Whether a value is a tensor with one storage; a sparse tensor is counted by its indices and values."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage that a tensor consists of."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values(), cast(Any, tensor).offsets()] if tensor.is_nested else []
