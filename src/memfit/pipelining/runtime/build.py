"""Builds the stages that one process runs from the plan of a pipeline.

Every process traces and cuts the model itself, and compares the stages with the planned ones before anything runs. The
process that planned uses the captures that it made for planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import Capture, capture_step
from memfit.errors import PlanMismatchError
from memfit.ir.program import Program
from memfit.ir.serialization import graph_digest
from memfit.pipelining.partition.cut_points import find_cuts
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.pipelining.partition.stages import Stage, cut_into_stages, example_inputs
from memfit.pipelining.plan import PipelinePlan, StageProgram, calls_digest
from memfit.pipelining.runtime.rng import RandomStream
from memfit.pipelining.runtime.send_queue import Outbox
from memfit.pipelining.runtime.stage import EngineStage, StageCall
from memfit.pipelining.search.sent_results import handing_over
from memfit.pipelining.search.split_backward import with_deferred
from memfit.pipelining.search.stage_capture import accumulation_of
from memfit.runtime.deferred_backward import Later
from memfit.runtime.executable import compile_program

__all__ = ["CompiledStage", "capture_stages", "compile_stage", "engine_stages", "planned_cuts"]

_MEND = "; give every process the same model, loss and shapes of inputs, or make a new pipeline for others"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStage:
    """Compiled calls that run one stage, a call for each micro-batch.

    Attributes:
        each: for each micro-batch, the stage for its size and the call that runs the module by its plan.
        later: list to which these calls add the second parts of backward passes.
    """

    each: tuple[tuple[Stage, StageCall], ...]
    later: Later


def planned_cuts(forward: ForwardGraph, plan: PipelinePlan) -> list[Stage]:
    """The stages of a plan.

    Raises:
        PlanMismatchError: if the model is not the planned one.
    """
    if calls_digest([node.target for node in forward.calls]) != plan.calls:
        raise PlanMismatchError(f"the pipeline was planned for a model that computes something else{_MEND}")
    cuts = {cut.position: cut for cut in find_cuts(forward)}
    if not set(plan.cuts) <= set(cuts):
        raise PlanMismatchError(f"the pipeline was planned for a model that is cut at other places{_MEND}")
    return cut_into_stages(forward, [cuts[position] for position in plan.cuts])


def capture_stages(
    plan: PipelinePlan,
    forwards: Sequence[tuple[ForwardGraph, Sequence[Any]]],
    mine: Sequence[int],
    device: torch.device,
) -> dict[int, CompiledStage]:
    """Captures stages in the same way as for planning, and compiles them.

    Args:
        plan: the plan to run.
        forwards: model and loss, traced on the first micro-batch, with its inputs; and on the last one, if it has
            another size.
        mine: the stages that this process runs.
        device: device on which the stages run.

    Returns:
        The stages, by number.

    Raises:
        PlanMismatchError: if the model here is not the planned one.
    """
    cut = [planned_cuts(forward, plan) for forward, _ in forwards]
    built = {}
    for index in mine:
        sizes = []
        for stages, (_, leaves), programs in zip(cut, forwards, (plan.stages, plan.last_stages), strict=False):
            program = programs[index]
            capture = _capture_planned(plan, stages[index], program, leaves, device)
            sizes.append((stages[index], capture, program))
        built[index] = compile_stage(sizes, len(plan.sizes))
    return built


def compile_stage(sizes: Sequence[tuple[Stage, Capture, StageProgram]], num_microbatches: int) -> CompiledStage:
    """Compiles a stage; runs nothing before the first micro-batch.

    Args:
        sizes: stage, capture and program for the size of the micro-batches; and for the size of the last one, if it
            differs.
        num_microbatches: of a batch.
    """
    runs: list[tuple[Stage, StageCall]] = []
    later: Later = []
    for stage, capture, program in sizes:
        runs.append((stage, _compiled(stage.module, capture, program.program, later)))
        if program.last_program is not None:
            runs.append((stage, _compiled(stage.module, capture, program.last_program, later)))
    return CompiledStage(each=(*[runs[0]] * (num_microbatches - 1), runs[-1]), later=later)


def engine_stages(
    plan: PipelinePlan,
    compiled: Mapping[int, CompiledStage],
    device: torch.device,
    stream: RandomStream | None,
    group: dist.ProcessGroup | None = None,
) -> dict[int, EngineStage]:
    """The stages that the engine runs.

    Args:
        plan: the plan to run.
        compiled: the stages that run here, by number.
        device: device on which the stages run.
        stream: of random numbers.
        group: the processes of the pipeline; None for all.
    """
    count, outbox = plan.schedule.num_stages, Outbox()
    return {
        index: EngineStage(stage.each, count, device, outbox, group, random_stream=stream, later=stage.later)
        for index, stage in compiled.items()
    }


def _capture_planned(
    plan: PipelinePlan, stage: Stage, program: StageProgram, leaves: Sequence[Any], device: torch.device
) -> Capture:
    """Captures a stage in the same way as for planning.

    Raises:
        PlanMismatchError: if the captured step is not the planned one.
    """
    args = example_inputs(stage, leaves, device)
    separate: Mapping[str, None] = dict.fromkeys(program.separated)
    captured = capture_step(
        *(stage.module, args, {}),
        options=CaptureOptions(
            separate=separate.__contains__,
            grid=program.grid,
            accumulate=accumulation_of(len(plan.sizes)),
        ),
    )
    capture = handing_over(captured)
    capture = with_deferred(capture) if plan.schedule.splits_backward else capture
    if graph_digest(capture.graph) != program.digest:
        raise PlanMismatchError(f"stage {stage.index} of the pipeline is not the step that was planned{_MEND}")
    return capture


def _compiled(module: nn.Module, capture: Capture, program: Program, later: Later) -> StageCall:
    return compile_program(module, capture, program, later=later).run
