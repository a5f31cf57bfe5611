"""From the plan of a pipeline to the stages that one process runs.

Every process traces and cuts the model itself, and compares what it gets with what was planned before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.capture.trace import Capture, capture_step
from memfit.errors import PlanMismatchError
from memfit.pipelining.cuts import find_cuts
from memfit.pipelining.engine_stage import EngineStage, StageCall
from memfit.pipelining.forward_graph import ForwardGraph
from memfit.pipelining.plan import PipelinePlan, StageProgram, calls_digest
from memfit.pipelining.random_stream import RandomStream
from memfit.pipelining.split_backward import with_deferred
from memfit.pipelining.stages import Stage, cut_into_stages, example_inputs
from memfit.runtime.apply import compile_program
from memfit.runtime.later import Later
from memfit.step.codec import graph_digest
from memfit.step.graph import StepGraph
from memfit.step.program import Program

__all__ = ["build_stages", "capture_planned", "planned_cuts"]


def planned_cuts(forward: ForwardGraph, plan: PipelinePlan) -> list[Stage]:
    """The stages of a plan.

    Raises:
        PlanMismatchError: if the model is not the planned one.
    """
    if calls_digest([node.target for node in forward.calls]) != plan.calls:
        raise PlanMismatchError("the pipeline was planned for a model that computes something else")
    cuts = {cut.position: cut for cut in find_cuts(forward)}
    if not set(plan.cuts) <= set(cuts):
        raise PlanMismatchError("the pipeline was planned for a model that is cut at other places")
    return cut_into_stages(forward, [cuts[position] for position in plan.cuts])


def build_stages(
    plan: PipelinePlan,
    forwards: Sequence[tuple[ForwardGraph, Sequence[Any]]],
    mine: Sequence[int],
    device: torch.device,
    stream: RandomStream | None,
    group: dist.ProcessGroup | None = None,
) -> dict[int, EngineStage]:
    """Compiles stages.

    Args:
        plan: what to run.
        forwards: model and loss as traced on the first micro-batch, with its inputs; and on the last one, if that has
            another size.
        mine: the stages that this process runs.
        device: where.
        stream: of random numbers.
        group: the processes of the pipeline; None for all.

    Returns:
        The stages, by number.

    Raises:
        PlanMismatchError: if the model here is not the planned one.
    """
    cut = [planned_cuts(forward, plan) for forward, _ in forwards]
    programs = [plan.stages, plan.last_stages][: len(forwards)]
    count = len(plan.sizes)
    built = {}
    for index in mine:
        runs: list[tuple[Stage, StageCall]] = []
        later: Later = []
        for stages, of_size, (_, leaves) in zip(cut, programs, forwards, strict=True):
            stage, program = stages[index], of_size[index]
            capture, _ = capture_planned(stage, program, leaves, device, defer=plan.schedule.splits_backward)
            runs.append((stage, _compiled(stage.module, capture, program.program, later)))
            if program.last_program is not None:
                last = stage, _compiled(stage.module, capture, program.last_program, later)
                runs.append(last)
        each = [runs[0]] * (count - 1) + [runs[-1]]
        built[index] = EngineStage(each, plan.schedule.num_stages, device, group, random_stream=stream, later=later)
    return built


def capture_planned(
    stage: Stage, program: StageProgram, leaves: Sequence[Any], device: torch.device, *, defer: bool
) -> tuple[Capture, StepGraph]:
    """Captures a stage as it was captured when it was planned.

    Raises:
        PlanMismatchError: if it is another step.
    """
    args = example_inputs(stage, leaves, device)
    separate: Mapping[str, None] = dict.fromkeys(program.separated)
    capture = capture_step(stage.module, args, {}, separate=separate.__contains__, grid=program.grid, accumulate=True)
    capture = with_deferred(capture) if defer else capture
    if graph_digest(capture.graph) != program.digest:
        raise PlanMismatchError(f"stage {stage.index} of the pipeline is not the step that was planned")
    return capture, capture.graph


def _compiled(module: nn.Module, capture: Capture, program: Program, later: Later) -> StageCall:
    return compile_program(module, capture, program, later=later).run
