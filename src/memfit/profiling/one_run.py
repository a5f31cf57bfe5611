"""Time and memory of one run on the device, and whether two results have the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from memfit.ir.graph import Variant
from memfit.profiling.memory import allocation_peak
from memfit.torch_compat.core import gpu_idle

__all__ = ["equal", "measured", "timed"]

_HEAD_START_CYCLES = 500_000
"""Cycles, about a third of a millisecond, that a CUDA device sleeps before a timed run."""


def equal(one: object, other: object) -> bool:
    """Whether two results have the same bits and the same strides."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one is None and other is None


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run; on CUDA the device waits until the host has had time to launch all kernels."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        gpu_idle(_HEAD_START_CYCLES)
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        del result
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    del result
    return seconds


def measured(run: Callable[[], object], device: torch.device) -> tuple[object, Variant]:
    """The result of one run, its time, and its peak memory beyond the result."""
    results: list[object] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = timed(lambda: results.append(run()), device)
        beyond = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    else:
        times: list[float] = []
        peak = allocation_peak(lambda: times.append(timed(lambda: results.append(run()), device)))
        (seconds,), beyond = times, peak - _result_bytes(results)
    return results[0], Variant(chunks=1, seconds=seconds, workspace_bytes=max(0, beyond))


def _result_bytes(results: Iterable[object]) -> int:
    storages: dict[int, int] = {}
    for result in results:
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = int(tensor.untyped_storage().nbytes())
    return sum(storages.values())
