"""Runs one device's part of a schedule alone, with made-up tensors in place of what other devices send.

So the peak of every device can be measured where there is only one, exactly and before any training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.pipelining.engine_stage import EngineStage
from memfit.planner.schedule import Action, Pass

__all__ = ["run_alone"]


def run_alone(
    order: Sequence[Action],
    stages: Mapping[int, EngineStage],
    leaves: Sequence[Sequence[Any]],
    weights: Sequence[torch.Tensor],
) -> None:
    """Runs what a device does in a step.

    Args:
        order: what it does, in order.
        stages: its stages by number.
        leaves: for each micro-batch the leaves of the step's inputs.
        weights: for each micro-batch what its loss counts.
    """
    losses: dict[int, torch.Tensor] = {}
    for stage in stages.values():
        stage.has_backward = True
        stage.clear_runtime_states()
    for action in order:
        stage, number = stages[action.stage], action.microbatch
        part, _ = stage.runs[number]
        if action.what is Pass.FORWARD:
            if not stage.is_first and number not in stage.arriving:
                stage.arriving[number] = (
                    *(_made_up(c.empty(stage.device)) for c in part.arriving),
                    *stage.random_states(),
                )
            result = stage.forward_one_chunk(number, tuple(leaves[number]))
            if stage.is_last:
                losses[number] = result * weights[number]
            elif stage.stage_index + 1 in stages:
                stages[stage.stage_index + 1].set_local_fwd_input(result, number)
            stage.to_send.pop(number, None)
            del result
        elif action.what is Pass.WEIGHT:
            stage.backward_weight_one_chunk(number)
        else:
            if not stage.is_last and number not in stage.returning:
                stage.returning[number] = [
                    _made_up(c.empty_gradient(stage.device)) if c.requires_grad else None for c in part.leaving
                ]
            whole = action.what is Pass.BACKWARD
            stage.backward_one_chunk(number, loss=losses.pop(number, None), full_backward=whole)
            gradients = stage.to_return.pop(number, ())
            if stage.stage_index - 1 in stages:
                stages[stage.stage_index - 1].set_local_bwd_input(gradients, number)
            del gradients


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.normal_(std=0.01) if tensor.dtype.is_floating_point else tensor.zero_()
