"""Runs a schedule on PyTorch's pipelining engine.

The engine executes any order of passes and transfers (`_PipelineScheduleRuntime`, private but the same since torch
2.10); it gets the order for which memory was planned. Schedules other than GPipe and 1F1B are the engine's own: their
orders come from its classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as engine

from memfit.errors import SpecError
from memfit.pipelining.runtime.stage import EngineStage
from memfit.planner.pipeline.schedule import (
    Action,
    Pass,
    Schedule,
    Send,
    Task,
    gpipe,
    one_forward_one_backward,
    with_transfers,
)
from memfit.torch_compat.distributed import PipelineStageBase

__all__ = ["SCHEDULES", "make_schedule", "runtime", "step_microbatches"]

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "zero-bubble": 1,
    "interleaved-zero-bubble": 2,
    "zero-bubble-v": 2,
}
"""Names of schedules, each with the number of stages per device."""

_ENGINE = {
    "interleaved-1f1b": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zero-bubble-v": "ZBVZeroBubble",
}

_PASSES = {
    "FORWARD": Pass.FORWARD,
    "FULL_BACKWARD": Pass.BACKWARD,
    "BACKWARD_INPUT": Pass.INPUT,
    "BACKWARD_WEIGHT": Pass.WEIGHT,
}


def make_schedule(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    """A schedule by name.

    Args:
        name: one of `SCHEDULES`.
        num_devices: number of devices.
        num_microbatches: number of parts into which the batch is cut.

    Raises:
        SpecError: if there is no schedule of that name, or it cannot run this number of micro-batches.
    """
    if name == "gpipe":
        return gpipe(num_devices, num_microbatches)
    if name == "1f1b":
        return one_forward_one_backward(num_devices, num_microbatches)
    if name not in _ENGINE:
        raise SpecError(f"unknown schedule {name!r}; there are 'auto', {', '.join(map(repr, SCHEDULES))}")
    return _from_engine(name, num_devices, num_microbatches, SCHEDULES[name])


class _Placeholder:
    """Stand-in for a stage, with the attributes that the engine's schedules read before anything runs."""

    has_backward = True

    def __init__(self, index: int, num_stages: int, num_devices: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = num_devices, 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod = torch.nn.Module()
        self.stage_index_to_group_rank: dict[int, int] = {}


def _from_engine(name: str, num_devices: int, num_microbatches: int, per_device: int) -> Schedule:
    num_stages = num_devices * per_device
    mine = (0, num_stages - 1) if name == "zero-bubble-v" else range(0, num_stages, num_devices)
    stages: list[Any] = [_Placeholder(i, num_stages, num_devices) for i in mine]
    kind: Any = engine.get_schedule_class(_ENGINE[name])
    try:
        made = kind(stages, num_microbatches, loss_fn=_weighted, scale_grads=False)
    except ValueError as error:
        raise SpecError(f"schedule {name!r} cannot run {num_microbatches} micro-batches: {error}") from None
    orders = tuple(
        tuple(
            Action(a.stage_index, _PASSES[a.computation_type.name], a.microbatch_index)
            for a in made.pipeline_order[device]
            if a is not None
        )
        for device in range(num_devices)
    )
    return Schedule(name=name, num_stages=num_stages, num_microbatches=num_microbatches, orders=orders)


def runtime(schedule: Schedule, stages: Sequence[PipelineStageBase], *, loss_fn: Any = None) -> Any:
    """The engine, ready to run a schedule with this process's stages; weights the losses unless `loss_fn` is given."""
    logging.getLogger(engine.__name__).setLevel(logging.CRITICAL)  # it logs whole schedules with an error that we raise
    made = engine._PipelineScheduleRuntime(
        list(stages), schedule.num_microbatches, loss_fn=_weighted, scale_grads=False
    )
    made._loss_fn = loss_fn or _weighted
    orders: Any = {
        device: [engine._Action.from_str(_as_engine_writes(task)) for task in order]
        for device, order in enumerate(with_transfers(schedule))
    }
    made._prepare_schedule_with_comms(orders, format="compute_comms")
    return made


def _as_engine_writes(task: Task) -> str:
    """A task in the engine's notation, such as `2F0`, or `2RECV_B0` for the receive of a backward pass."""
    if isinstance(task, Action):
        return str(task)
    kind = "SEND" if isinstance(task, Send) else "RECV"
    direction = "F" if task.of.what is Pass.FORWARD else "B"
    return f"{task.of.stage}{kind}_{direction}{task.of.microbatch}"


def step_microbatches(
    made: Any, stages: Sequence[EngineStage], leaves: Sequence[tuple[Any, ...]], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs one step.

    Args:
        made: the engine of `runtime`.
        stages: of this process.
        leaves: for each micro-batch the leaves of the step's inputs.
        weights: for each micro-batch the weight of its loss.

    Returns:
        The weighted losses, if this process has the last stage.
    """
    losses: list[torch.Tensor] = []
    # A failed step leaves its losses and transfers behind, and the engine would use them in the next step.
    for left in (made._internal_losses, made.fwd_recv_ops, made.bwd_recv_ops):
        left.clear()
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    made._step_microbatches(
        arg_mbs=list(leaves),
        kwarg_mbs=[{} for _ in leaves],
        target_mbs=list(weights),
        losses=losses,
        return_outputs=False,
    )
    for stage in stages:
        stage.outbox.finish()
    return [loss.detach() for loss in losses]


def _weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return loss * weight
