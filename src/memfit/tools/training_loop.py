"""One step of a training loop as a callable, its resident memory, and measurements of its peak and time.

`compare`, `verify` and the demo run plain and planned steps; all must run the same step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import LossFunction, forward_and_backward
from memfit.capture.optimizer.unwrapped import OptimizerLike, stated_bytes, steppable
from memfit.capture.residents import storage_bytes
from memfit.profiling.memory import Measurement, measure, steady
from memfit.torch_compat.core import pytree

__all__ = ["interleaved_seconds", "resident_bytes", "step_peak", "training_step"]

_SHORT_SECONDS = 0.5
_MOST_TURNS = 50


def training_step(
    call: Callable[..., Any],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | None = None,
    hold_outputs: bool = True,
) -> Callable[[], torch.Tensor | None]:
    """A step: forward, loss, backward, `optimizer.step()` if there is an optimizer, gradients set to None.

    Args:
        call: the model's call, plain or planned.
        model: the model, whose parameters receive gradients.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: as for `memfit.plan`.
        optimizer: optimizer of the model's parameters.
        hold_outputs: whether the loop holds the outputs until the backward pass ends, or only until the loss is there.

    Returns:
        A callable that runs one step and returns the loss, detached, if there is one.
    """
    stepped = steppable(optimizer)

    def step() -> torch.Tensor | None:
        loss = forward_and_backward(lambda: call(*args, **kwargs), loss_fn, hold_outputs=hold_outputs)
        if stepped is not None:
            stepped.step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return step


def resident_bytes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    optimizer: OptimizerLike | None,
    device: torch.device,
) -> int:
    """Bytes of a step that are in memory before it: parameters, gradients, buffers, inputs, optimizer state."""
    stepped = steppable(optimizer)
    state = [] if stepped is None else pytree.tree_leaves(list(stepped.state.values()))
    stated = 0 if optimizer is None or stepped is not None else stated_bytes(optimizer)
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((list(args), kwargs)), *state]
    tensors += [p.grad for p in model.parameters()]
    return storage_bytes(tensors, device.type) + stated


def step_peak(step: Callable[[], object], device: torch.device, resident: Callable[[], int], *, warmup: int = 1) -> int:
    """Measured peak of a step, including the `resident()` bytes before it; other tensors of the process do not count.

    After a warm-up, the measured step may run more than once, until it compiles nothing; without warm-up it runs
    exactly once.
    """
    for _ in range(warmup):
        step()
    start = resident()

    def once() -> Measurement:
        return measure(step, device=device, warmup=0, repeats=0, start_bytes=start)

    return (steady(once) if warmup else once()).peak_bytes


def interleaved_seconds(
    steps: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Median wall-clock time of each step, run in turns so that a drift of the machine's speed affects all equally.

    Args:
        steps: steps to time, each already run once.
        device: where they run.
        repeats: least number of turns; there are more, up to 50, until the timed steps take half a second.
        progress: called with the number of runs that are done, out of the least number.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    turns, spent = 0, 0.0
    while turns < repeats or (spent < _SHORT_SECONDS and turns < _MOST_TURNS):
        # Every other turn runs in reverse order: the order of the steps must not matter.
        for index in range(len(steps)) if turns % 2 == 0 else reversed(range(len(steps))):
            if progress is not None:
                progress(min(turns, repeats) * len(steps), repeats * len(steps))
            _synchronize(device)
            begin = time.perf_counter()
            steps[index]()
            _synchronize(device)
            seconds[index].append(time.perf_counter() - begin)
            spent += seconds[index][-1]
        turns += 1
    if progress is not None:
        progress(repeats * len(steps), repeats * len(steps))
    return [statistics.median(s) for s in seconds]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
