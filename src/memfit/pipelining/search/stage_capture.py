"""Captured and profiled steps of stages, and the memory of parameters on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import structs

from memfit.capture.optimizer.state import optimizer_cost, part_of, trained_bytes
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import Capture
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.ir.graph import StepGraph
from memfit.ir.residents import ResidentKind
from memfit.ops.accumulation import Accumulate
from memfit.pipelining.config import Question
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.pipelining.partition.stages import Stage, example_inputs
from memfit.pipelining.search.sent_results import handing_over
from memfit.pipelining.search.split_backward import with_deferred

__all__ = ["accumulation_of", "capture_stage", "deferring", "passing_bytes", "state_bytes"]

_SCALAR_BYTES = 16
"""Bytes that the engine holds for each micro-batch, without crossing tensors: its loss and the root of its backward."""


def capture_stage(
    stage: Stage,
    leaves: Sequence[Any],
    question: Question,
    device: torch.device,
    *,
    grid: tuple[int, ...] = (),
    before: Capture | None = None,
) -> tuple[Capture, StepGraph]:
    """Captures and profiles the step that the engine runs for one micro-batch of a stage.

    Args:
        stage: of the model.
        leaves: inputs of the first micro-batch.
        question: requirements for the pipeline.
        device: device on which the stage runs.
        grid: grid of tiles of the step; empty for none.
        before: an earlier capture of the stage, perhaps with another grid; its trace is used again.
    """
    parameters = [p for p in stage.module.parameters() if p.requires_grad]
    whole = question.optimizer
    part = None if whole is None else part_of(whole, parameters, question.trained_bytes)
    request = Request(
        budget=0,
        optimizer=part,
        tiers=question.tiers,
        levers=question.levers,
        capture=CaptureOptions(accumulate=accumulation_of(question.num_microbatches)),
        label=f"stage {stage.index}",
    )
    args = example_inputs(stage, leaves, device)
    captured, _ = capture_and_profile(stage.module, args, {}, request, grid=grid, before=before)
    capture = handing_over(captured)
    beside = _SCALAR_BYTES * (question.num_microbatches + 1) + passing_bytes(stage)
    return capture, capture.graph.beside("messages", beside, ResidentKind.OTHER)


def passing_bytes(stage: Stage) -> int:
    """Bytes of arriving tensors that the stage's module does not take."""
    return sum(c.nbytes for place, c in enumerate(stage.arriving) if place not in stage.taken)


def accumulation_of(num_microbatches: int) -> Accumulate:
    """How a stage adds up gradients: those of a single micro-batch equal the unpipelined step's bit for bit."""
    return Accumulate.AS_MADE if num_microbatches > 1 else Accumulate.WHOLE


def deferring(capture: Capture, graph: StepGraph) -> tuple[Capture, StepGraph]:
    """A profiled stage with the gradients of its weights last."""
    moved = with_deferred(capture)
    return moved, structs.replace(graph, ops=moved.graph.ops)


def state_bytes(forward: ForwardGraph, question: Question, device: torch.device) -> Mapping[str, int]:
    """Bytes of each parameter or buffer by name, with its gradient and its share of the optimizer's state."""
    optimizer = question.optimizer
    of_optimizer = 0.0
    if optimizer is not None:
        total = trained_bytes(optimizer, list(forward.tensors.values()))
        of_optimizer = optimizer_cost(optimizer, device.type).state_bytes / max(1, total)
    found: dict[str, int] = {}
    for name, tensor in forward.tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        found[name] = int(nbytes * (2 + of_optimizer)) if tensor.requires_grad else nbytes
    return found
