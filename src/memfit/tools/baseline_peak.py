"""The peak of a baseline step: counted on fake tensors, or measured in real steps if the model's code reads values.

Numbers read from tensors, masks by index and sorted tokens lead to sizes that are known only in a run. A model with
such code also runs while it is captured. Here it runs if twice the memory that its graph predicts is free. If it
cannot run, code that takes another path on fake tensors is counted on that path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import LossFunction, forward_and_backward
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import preserved
from memfit.device_memory import free_bytes
from memfit.distributed import process_group as processes
from memfit.profiling.baseline_peak import BaselinePeak, counted_step
from memfit.profiling.memory import measure

__all__ = ["baseline_peak"]

log = logging.getLogger(__name__)


def baseline_peak(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    device: torch.device,
    *,
    predicted_bytes: int,
) -> BaselinePeak | None:
    """The peak of a step without optimizer; the model and all objects reachable from it stay unchanged.

    Args:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: the user's loss.
        device: of the model.
        predicted_bytes: peak that its graph predicts.

    Returns:
        The peak; None if it can be neither counted nor measured.
    """
    counted = counted_step(model, args, kwargs, loss_fn, device.type)
    if counted is not None:
        return counted
    # A real step of one process among several would wait for the other processes in its collectives.
    among_others = torch.distributed.is_available() and processes.world_size() > 1
    measured = None
    if device.type != "meta" and not among_others and 2 * predicted_bytes <= free_bytes(device):
        measured = _measured_step(model, args, kwargs, loss_fn, device)
    return measured or counted_step(model, args, kwargs, loss_fn, device.type, as_eager=False)


def _measured_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    device: torch.device,
) -> BaselinePeak | None:
    inputs = detached(args, kwargs)
    fresh = [parameter for parameter in model.parameters() if parameter.grad is None]

    def step(hold_outputs: bool) -> None:
        forward_and_backward(lambda: model(*inputs.args, **inputs.kwargs), loss_fn, hold_outputs=hold_outputs)
        for parameter in fresh:
            parameter.grad = None

    def peak_bytes(*, hold_outputs: bool, warmup: int) -> int:
        run = partial(step, hold_outputs)
        return measure(run, device=device, warmup=warmup, repeats=0, start_bytes=0).peak_bytes

    try:
        with preserved(model, args, kwargs, loss_fn):
            step_bytes = peak_bytes(hold_outputs=False, warmup=1)
            held_bytes = peak_bytes(hold_outputs=True, warmup=0)
        return BaselinePeak(step_bytes=step_bytes, outputs_held_bytes=max(0, held_bytes - step_bytes))
    except Exception as error:  # of the user's code: the prediction of the graph remains
        log.info("the baseline step does not run: %s: %s", type(error).__name__, error)
        return None
