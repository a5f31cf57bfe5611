"""The fuzz's own measure of a step's memory: bytes of storages made while it is active and not yet gone.

It sees every call that reaches the dispatcher, planned or plain, and the end of each storage by a finalizer, so it
shares nothing with what memfit measures by. *Known limits*: what kernels take and give back by themselves is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "storage_bytes"]

_Made = TypeVar("_Made")


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        existing: tensors that are there already and do not count.

    Attributes:
        peak_bytes: the most that there was at once.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Keeps Dynamo from taking the mode for a part of the program."""
        return True

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._now = 0
        self._known = {_key(tensor) for tensor in existing}
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._count(tensor)
        return made

    def only_result(self, make: Callable[[], _Made]) -> _Made:
        """Counts what a function returns, and not what it takes to make that."""
        with _disable_current_modes():
            made = make()
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._count(leaf)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._known or tensor.is_meta:  # tensors on the meta device have a size and no memory
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        self._known.add(key)
        self._made[key] = (weakref.ref(storage), nbytes)
        self._now += nbytes
        weakref.finalize(storage, self._gone, key)
        if self._now > self.peak_bytes:
            self._see_resized()
            self.peak_bytes = max(self.peak_bytes, self._now)

    def _see_resized(self) -> None:
        """Counts storages anew that were made larger or smaller; a tensor may be there for its shape only."""
        for key, (made, nbytes) in list(self._made.items()):
            storage = made()
            if storage is not None and storage.nbytes() != nbytes:
                self._made[key] = (made, storage.nbytes())
                self._now += storage.nbytes() - nbytes

    def _gone(self, key: int) -> None:
        _, nbytes = self._made.pop(key)
        self._now -= nbytes
        self._known.discard(key)


def storage_bytes(tensors: Iterable[torch.Tensor], *, rounded_to: int = 1) -> int:
    """Bytes of the storages behind tensors, each once and rounded up to a multiple."""
    storages = {_key(t): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
    return sum(-(-nbytes // rounded_to) * rounded_to for nbytes in storages.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
