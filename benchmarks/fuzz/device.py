"""What the fuzz needs on a CUDA device beside what it does on a CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from typing import Self, TypeVar

import torch

__all__ = ["AllocatorBytes", "library_bytes", "same_bits_each_time"]

_Made = TypeVar("_Made")


class AllocatorBytes:
    """Counts what CUDA's allocator hands out while it is entered, beyond what it had handed out before.

    Attributes:
        peak_bytes: the most that there was at once, known at the end.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = torch.cuda.max_memory_allocated() - self._before

    def only_result(self, make: Callable[[], _Made]) -> _Made:
        """Inputs are made on the CPU, so nothing else is counted."""
        return make()


def same_bits_each_time() -> None:
    """Takes kernels that give the same bits each time, where there are such; the others only warn."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


@cache
def library_bytes(device: str) -> int:
    """What cuBLAS takes at its first calls, forward and backward, and keeps; a budget has to hold it too."""
    if device == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    x = torch.ones(32, 32, device=device, requires_grad=True)
    torch.nn.functional.linear(x, x, x[0]).sum().backward()
    del x
    return max(0, torch.cuda.memory_allocated() - before)
