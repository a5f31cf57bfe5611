"""Measures the peak memory and the time of a step; everything in memfit is measured this way.

CUDA's allocator reports its own peak. On CPU, the profiler's memory events are every allocation and free of the CPU
allocator, including kernel workspace, so their running sum is the exact memory of the step above its start. Time is
measured in other runs, without the profiler.

Known limits: memory that a library allocates behind torch's allocators (oneDNN scratch, thread stacks) is not seen on
CPU. Memory that Dynamo takes while it compiles in the middle of a step counts in the step's peak;
`Measurement.compiled` tells whether it compiled.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from memfit.capture.allocation_tracker import LiveBytes, parts_of
from memfit.torch_compat.compiler import counters
from memfit.torch_compat.core import (
    EventType,
    clear_cublas_workspaces,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    profiler_is_on,
)

__all__ = ["Measurement", "allocation_peak", "live_tensor_bytes", "measure", "quiet_profiler", "steady"]

_MOST_REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Peak memory and time of a measured step.

    Attributes:
        peak_bytes: highest memory during the step, including memory that was in use before.
        compiled: whether something was compiled in the run with this peak; compilation takes memory of its own for a
            moment.
        start_bytes: memory in use when the step began.
        reserved_bytes: highest memory that CUDA's caching allocator held; equals `peak_bytes` on CPU.
        step_seconds: median time of a step.
        all_seconds: times of all timed runs.
    """

    peak_bytes: int
    compiled: bool
    start_bytes: int
    reserved_bytes: int
    step_seconds: float
    all_seconds: tuple[float, ...]


def measure(
    step: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 1,
    repeats: int = 3,
    start_bytes: int | None = None,
) -> Measurement:
    """Runs a step and measures its peak memory and its time.

    Args:
        step: runs one step; called `warmup + 1 + repeats` times.
        device: device whose memory is measured.
        warmup: runs before anything is measured.
        repeats: timed runs.
        start_bytes: memory that belongs to the step before it runs (parameters, inputs, ...); by default all tensors
            alive in the process on that device, on CUDA all allocated memory.

    Returns:
        Peak and median time.
    """
    device = torch.device(device)
    for _ in range(warmup):
        step()
    before = _compilations()
    torch.clear_autocast_cache()  # an autocast region of the caller caches casts of weights; a step makes them
    if device.type == "cuda":
        peak, start, reserved = _cuda_peak(step, device)
        if start_bytes is not None:  # other memory does not belong to the step
            peak, start = start_bytes + peak - start, start_bytes
    else:
        if start_bytes is None:
            gc.collect()
        start = live_tensor_bytes(device.type) if start_bytes is None else start_bytes
        with _nothing_collected():
            peak = reserved = start + allocation_peak(step)
    compiled = _compilations() > before
    seconds = []
    for _ in range(repeats):
        _synchronize(device)
        begin = time.perf_counter()
        step()
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return Measurement(
        peak_bytes=peak,
        compiled=compiled,
        start_bytes=start,
        reserved_bytes=reserved,
        step_seconds=statistics.median(seconds) if seconds else 0.0,
        all_seconds=tuple(seconds),
    )


def steady(measure_step: Callable[[], Measurement]) -> Measurement:
    """Measures a step until Dynamo compiles nothing in it, at most three times.

    The second step compiles once more where the first one set an attribute that Dynamo guards: some models of
    transformers store the kind of their loss in their configuration.

    Args:
        measure_step: runs one step and measures it; one step must have run before.
    """
    measured = measure_step()
    for _ in range(_MOST_REPEATS):
        if measured.compiled:
            measured = measure_step()
    return measured


def _compilations() -> int:
    """How often Dynamo compiled a frame or AOTAutograd a graph; a plan may compile a graph late that Dynamo knows."""
    return counters["frames"]["total"] + counters["aot_autograd"]["total"]


def allocation_peak(run: Callable[[], object]) -> int:
    """Highest sum of the CPU allocations of `run` minus their frees, in bytes.

    Memory that was there before does not count, nor do its frees: the allocator knows the size of such a block only if
    another profiler ran when the block was allocated, so the result would depend on earlier measurements.
    """
    if profiler_is_on():
        # The program is being profiled, and profilers do not nest: count storages, without workspace.
        with LiveBytes("cpu") as counter:
            run()
        return int(counter.peak)
    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        run()
    events = sorted(_allocations(recorded.profiler.kineto_results), key=lambda event: event.start_time_ns)
    allocated: set[int] = set()
    live = peak = 0
    for event in events:
        block = event.extra_fields
        if block.alloc_size > 0:
            allocated.add(block.ptr)
        elif block.ptr in allocated:
            allocated.remove(block.ptr)
        else:
            continue
        live += block.alloc_size
        peak = max(peak, live)
    return peak


def _allocations(results: Any) -> Iterator[Any]:
    """The allocations and frees of a profile, with their addresses."""
    waiting = list(reversed(results.experimental_event_tree()))
    while waiting:
        event = waiting.pop()
        waiting.extend(reversed(event.children))
        if event.tag == EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keeps the garbage collector from freeing older objects, which would count as memory freed by the step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def quiet_profiler() -> None:
    """Keeps the profiler from writing its own log to the terminal."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def live_tensor_bytes(device_type: str) -> int:
    """Bytes of the distinct storages of all tensors alive in this process on one device type."""
    parts = [part for tensor in _live(device_type) for part in parts_of(tensor)]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def largest_tensors(count: int = 8) -> str:
    """Shapes, dtypes and devices of the largest tensors alive, for error messages."""
    tensors = sorted(_live(None), key=lambda t: -sum(part.untyped_storage().nbytes() for part in parts_of(t)))
    return ", ".join(f"{tuple(t.shape)} {t.dtype} {t.device}" for t in tensors[:count])


def _live(device_type: str | None) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for thing in gc.get_objects():
        # Subclasses other than parameters (fake tensors) have no memory of their own, nor have wrappers.
        if type(thing) not in (torch.Tensor, torch.nn.Parameter) or is_functional_tensor(thing):
            continue
        if not is_functorch_wrapped_tensor(thing) and (device_type is None or thing.device.type == device_type):
            found.append(thing)
    return found


def _cuda_peak(step: Callable[[], object], device: torch.device) -> tuple[int, int, int]:
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    # The workspace that cuBLAS allocates at its first call and keeps belongs to the step: the first step below
    # allocates it, and the second one has it.
    clear_cublas_workspaces()
    start = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), start, torch.cuda.max_memory_reserved(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
