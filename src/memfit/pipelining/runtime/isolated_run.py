"""Runs one device's part of a schedule alone, with made-up tensors in place of the tensors from other devices.

So the peak of every device can be measured on a single device, exactly and before any training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.pipelining.runtime.stage import EngineStage
from memfit.planner.pipeline.schedule import Action, Pass, Receive, Task

__all__ = ["run_alone"]


def run_alone(
    order: Sequence[Task],
    stages: Mapping[int, EngineStage],
    leaves: Sequence[Sequence[Any]],
    weights: Sequence[torch.Tensor],
) -> None:
    """Runs the passes of one device in a step.

    Args:
        order: tasks of the device, in order.
        stages: stages of the device, by number.
        leaves: for each micro-batch the leaves of the step's inputs.
        weights: for each micro-batch the weight of its loss.
    """
    losses: dict[int, torch.Tensor] = {}
    for stage in stages.values():
        stage.has_backward = True
        stage.clear_runtime_states()
    for action in order:
        if isinstance(action, Receive):
            _receive(stages[action.of.stage], action.of)
        if not isinstance(action, Action):
            continue
        stage, number = stages[action.stage], action.microbatch
        if action.what is Pass.FORWARD:
            result = stage.forward_one_chunk(number, tuple(leaves[number]))
            if stage.is_last:
                losses[number] = result * weights[number]
            elif stage.stage_index + 1 in stages:
                stages[stage.stage_index + 1].set_local_fwd_input(result, number)
            else:
                stage.outbox.hold(result, answer=(action.stage, number))
            del result
        elif action.what is Pass.WEIGHT:
            stage.backward_weight_one_chunk(number)
        else:
            whole = action.what is Pass.BACKWARD
            stage.backward_one_chunk(number, loss=losses.pop(number, None), full_backward=whole)
            gradients = stage.to_return.pop(number, ())
            if stage.stage_index - 1 in stages:
                stages[stage.stage_index - 1].set_local_bwd_input(gradients, number)
            else:
                stage.outbox.hold([gradient for gradient in gradients if gradient is not None])
            del gradients
    for stage in stages.values():
        stage.outbox.finish()


def _receive(stage: EngineStage, taker: Action) -> None:
    """Makes up the tensors that a pass takes from another device; random states are the current ones."""
    part, _ = stage.runs[taker.microbatch]
    room: Sequence[torch.Tensor | None]
    if taker.what is Pass.FORWARD:
        room = stage.room_for_results(taker.microbatch)[: len(part.arriving)]
    else:
        room = stage.room_for_gradients(taker.microbatch)
    for tensor in room:
        if tensor is not None and tensor.dtype.is_floating_point:
            tensor.normal_(std=0.01)
        elif tensor is not None:
            tensor.zero_()
