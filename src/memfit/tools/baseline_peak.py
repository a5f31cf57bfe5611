"""The peak of a baseline step: counted on fake tensors, or measured in one real step if the model's code reads values.

Numbers read from tensors, masks by index and sorted tokens lead to sizes that are known only in a run. A model with
such code also runs while it is captured. Here it runs if twice the memory that its graph predicts is free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import LossFunction, backward_of
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import preserved
from memfit.device_memory import free_bytes
from memfit.distributed import process_group as processes
from memfit.profiling.baseline_peak import counted_step
from memfit.profiling.memory import measure

__all__ = ["PlainPeak", "baseline_peak"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPeak:
    """The peak of a baseline step.

    Attributes:
        step_bytes: peak memory beyond the memory that is in use before the step.
        at: the op at the peak; empty if it was measured.
    """

    step_bytes: int
    at: str = ""


def baseline_peak(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    device: torch.device,
    *,
    predicted_bytes: int,
) -> PlainPeak | None:
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
        return PlainPeak(step_bytes=counted[0], at=counted[1])
    # A real step of one process among several would wait for the other processes in its collectives.
    among_others = torch.distributed.is_available() and processes.world_size() > 1
    if device.type == "meta" or among_others or 2 * predicted_bytes > free_bytes(device):
        return None
    inputs = detached(args, kwargs)
    fresh = [parameter for parameter in model.parameters() if parameter.grad is None]

    def step() -> None:
        backward_of(model(*inputs.args, **inputs.kwargs), loss_fn)
        for parameter in fresh:
            parameter.grad = None

    try:
        with preserved(model, args, kwargs, loss_fn):
            return PlainPeak(step_bytes=measure(step, device=device, repeats=0, start_bytes=0).peak_bytes)
    except Exception as error:  # of the user's code: the prediction of the graph remains
        log.info("the baseline step does not run: %s: %s", type(error).__name__, error)
        return None
