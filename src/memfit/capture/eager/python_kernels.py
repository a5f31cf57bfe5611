"""Replaces an op's own kernel by a Python kernel during a trace.

The Python dispatcher, under which AOTAutograd traces, looks in an op's `py_kernels` first. This table is shared by the
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memfit.torch_compat.core import DispatchKey, OpOverload

__all__ = ["kernels_in_place", "without_kernel"]


@contextmanager
def kernels_in_place(kernels: Mapping[OpOverload, Callable[..., Any]], key: DispatchKey) -> Iterator[None]:
    """While active, ops run the given kernels at a dispatch key; earlier kernels are restored afterwards."""
    before = {op: op.py_kernels.get(key) for op in kernels}
    try:
        for op, kernel in kernels.items():
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
        yield
    finally:
        for op, earlier in before.items():
            op.py_kernels.pop(key, None)
            if earlier is not None:
                op.py_kernels[key] = earlier
            op._dispatch_cache.clear()


@contextmanager
def without_kernel(op: OpOverload, key: DispatchKey) -> Iterator[None]:
    """While active, an op runs its own kernel; for a Python kernel that calls the op that it replaces."""
    kernel = op.py_kernels.pop(key)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
