"""The memory that the CPU's allocator hands out, from the record of torch's profiler.

A dispatch mode sees each tensor, but while one is active, autograd never adds a gradient in place to another one
(`isTensorSubclassLike` in `torch/csrc/autograd/input_buffer.cpp`), so a step takes more than in a user's loop. A step
that is over its budget by `LiveBytes` is measured by this record too. *Known limits*: slow.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any, Self, TypeVar

from torch.profiler import ProfilerActivity, profile

__all__ = ["CpuAllocatorBytes"]

_Made = TypeVar("_Made")


class CpuAllocatorBytes:
    """Counts while it is entered.

    Attributes:
        peak_bytes: the most that there was at once, beyond what there was before; known at the end.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._record: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)

    def __enter__(self) -> Self:
        gc.collect()
        self._record.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._record.__exit__(*failure)
        events = [e for e in self._record.profiler.kineto_results.events() if e.name() == "[memory]"]
        taken = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        self.peak_bytes = max(itertools.accumulate(taken), default=0)

    def only_result(self, make: Callable[[], _Made]) -> _Made:
        """What it takes to make the inputs is counted too; it is gone before the peak."""
        return make()
