"""Plans a pipeline: checks that micro-batches give the same gradients, searches for a plan, and proves it by a run.

The proof runs each device's part of the schedule alone with made-up tensors, and measures its peak. If a measured peak
exceeds the budget, the search is repeated with a budget that is lower by the difference.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs
from torch import nn

from memfit.capture.optimizer.state import optimizer_cost, part_of
from memfit.capture.residents import storage_bytes
from memfit.capture.state.snapshot import preserved
from memfit.compiler.correction import MOST_PLANS
from memfit.distributed import process_group as processes
from memfit.fxir.module_names import module_of
from memfit.ir.serialization import graph_digest
from memfit.pipelining.config import Found, Question, StagePlan
from memfit.pipelining.loss.microbatches import batch_size, cut_batch, first_samples, with_samples
from memfit.pipelining.loss.sample_independence import check_halves, refuse_batch_norm, refuse_mixing
from memfit.pipelining.loss.scaling import loss_shares, read_loss
from memfit.pipelining.loss.traced import TracedLosses
from memfit.pipelining.partition.forward_graph import ForwardGraph, loss_of
from memfit.pipelining.plan import PipelinePlan, StageProgram, calls_digest
from memfit.pipelining.runtime.build import CompiledStage, compile_stage, engine_stages
from memfit.pipelining.runtime.isolated_run import run_alone
from memfit.pipelining.runtime.rng import RandomStream
from memfit.pipelining.runtime.stage import EngineStage
from memfit.pipelining.search.device_budgets import above_budget, corrected, fits
from memfit.pipelining.search.search import asked_schedule, plan_cuts, search
from memfit.planner.pipeline.device_memory import StageMemory, device_peaks
from memfit.planner.pipeline.schedule import with_transfers
from memfit.profiling.memory import measure

__all__ = ["Made", "make_pipeline_plan", "resident_bytes"]

log = logging.getLogger(__name__)

Forwards = Sequence[tuple[ForwardGraph, Sequence[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A plan, and the compiled stages of the process that made the plan.

    Attributes:
        plan: for batches of one shape.
        compiled: its stages that run in this process, by number.
    """

    plan: PipelinePlan
    compiled: Mapping[int, CompiledStage]


def make_pipeline_plan(
    traced: TracedLosses,
    forwards: Forwards,
    sizes: Sequence[int],
    question: Question,
    device: torch.device,
    *,
    fixed: PipelinePlan | None = None,
) -> Made:
    """Plans batches of one shape.

    Args:
        traced: the model in training mode, its loss, and the batch.
        forwards: model and loss, traced on the first micro-batch, with its inputs; and on the last, if that is smaller.
        sizes: the samples of each micro-batch.
        question: requirements for the pipeline.
        device: of the model.
        fixed: a plan whose cuts and schedule the new plan must have, if the model is cut already.

    Raises:
        BudgetError: if no plan fits.
        CaptureError: if gradients would change.
    """
    forward, part = forwards[0]
    parts = cut_batch(traced.leaves, sizes)
    if len(sizes) > 1 and not question.allow_batch_norm:
        refuse_batch_norm(forward, traced.model)
        _check_samples(traced, forwards, sizes)
    target = question.budget_bytes
    for _ in range(MOST_PLANS):
        asked = replace(question, budget_bytes=target)
        if fixed is None:
            found = search(forward, part, asked, device)
        else:
            schedule = asked_schedule(fixed.schedule.name, asked)
            found = plan_cuts(forward, part, schedule, fixed.cuts, asked, device)
        last = () if len(forwards) == 1 else plan_cuts(*forwards[1], found.schedule, found.cuts, asked, device).stages
        plan = _plan(forward, found, last, sizes, question)
        made = Made(plan=plan, compiled=_compiled(plan, found.stages, last, first_only=question.in_processes))
        if not question.prove or question.in_processes:  # several processes prove it together, with transfers
            return made
        peaks = _measured_peaks(traced.model, made, parts, question, device)
        made = replace(made, plan=structs.replace(plan, measured_peak_bytes=tuple(peaks)))
        if question.budget_bytes is None or target is None or fits(peaks, question.budget_bytes):
            return made
        target = corrected(target, question.budget_bytes, plan.peak_bytes, peaks)
        log.info("devices took %s bytes, above their budgets; planning for %s", peaks, target)
    assert question.budget_bytes is not None
    raise above_budget(peaks, question.budget_bytes)


def _compiled(
    plan: PipelinePlan, stages: Sequence[StagePlan], last: Sequence[StagePlan], *, first_only: bool
) -> dict[int, CompiledStage]:
    """The stages, compiled from the captures of the search; with several processes, only the stages of the first."""
    compiled = {}
    for index, device in plan.schedule.device_of().items():
        if first_only and device != 0:
            continue
        sizes = [(stages[index].stage, stages[index].capture, plan.stages[index])]
        if last:
            sizes.append((last[index].stage, last[index].capture, plan.last_stages[index]))
        compiled[index] = compile_stage(sizes, len(plan.sizes))
    return compiled


def _measured_peaks(
    model: nn.Module,
    made: Made,
    parts: Sequence[Sequence[Any]],
    question: Question,
    device: torch.device,
) -> list[int]:
    """The measured peak of each device, run alone. Leaves the model unchanged."""
    processes.join()
    plan = made.plan
    of = plan.schedule.device_of()
    peaks = []
    for number, order in enumerate(with_transfers(plan.schedule)):
        mine = {stage: compiled for stage, compiled in made.compiled.items() if of[stage] == number}
        stream = RandomStream(device, len(plan.sizes)) if plan.takes_random else None
        weights = [torch.tensor(1.0, dtype=torch.float64, device=device) for _ in parts]
        with preserved(model):
            stages = engine_stages(plan, mine, device, stream)
            for parameter in model.parameters():
                parameter.grad = None
            if stream is not None:
                stream.begin()
            step = functools.partial(run_alone, order, stages, parts, weights)

            start = resident_bytes(list(stages.values()), parts[0], question, device)
            peaks.append(measure(step, device=device, warmup=1, repeats=0, start_bytes=start).peak_bytes)
            for parameter in model.parameters():
                parameter.grad = None
    return peaks


def resident_bytes(stages: Sequence[EngineStage], part: Sequence[Any], question: Question, device: torch.device) -> int:
    """Bytes that stages hold all the time: parameters, gradients, optimizer state, buffers and their inputs."""
    static = [t for s in stages for t in (*s.submod.parameters(), *s.submod.buffers())]
    leaves = [part[place] for stage in stages for place in stage.runs[0][0].leaves]
    parameters = list({id(p): p for s in stages for p in s.submod.parameters() if p.requires_grad}.values())
    total = storage_bytes([*static, *leaves], device.type) + sum(p.numel() * p.element_size() for p in parameters)
    if question.optimizer is not None:
        total += optimizer_cost(
            part_of(question.optimizer, parameters, question.trained_bytes), device.type
        ).state_bytes
    return total


def _check_samples(traced: TracedLosses, forwards: Forwards, sizes: Sequence[int]) -> None:
    """Checks, by shapes and by a trial on a few samples, that the losses of micro-batches add up to the loss."""
    model, leaves = traced.model, traced.leaves
    batch = batch_size(leaves)
    for size, forward in zip((sizes[0], sizes[-1]), forwards, strict=False):
        traced.of(size, forward)

    def loss(part: Sequence[Any]) -> torch.Tensor:
        args, kwargs, target = traced.spec.unflatten(part)
        return loss_of(model, args, kwargs, target, traced.loss_fn)

    # A single sample is often a special case, which shows nothing about other numbers of samples.
    few, more = sorted([sizes[0] if sizes[0] > 1 else 2, 3 if sizes[0] <= 2 else 2]) if batch > 2 else (1, 2)
    refuse_mixing(traced.of(few), traced.of(more), with_samples(leaves))
    half = 2 if batch >= 4 else 1
    unlike = more if half == few else few
    reading = read_loss(traced.of(half)).settled(read_loss(traced.of(unlike)), unlike / half)
    some = first_samples(leaves, 2 * half)
    halves = cut_batch(some, [half, half])
    shares = loss_shares([reading, reading], halves, [half, half])
    check_halves(
        model,
        lambda: loss(some),
        lambda: [loss(part) * share for part, share in zip(halves, shares, strict=True)],
    )


def _plan(
    forward: ForwardGraph, found: Found, last: Sequence[StagePlan], sizes: Sequence[int], question: Question
) -> PipelinePlan:
    def memory(stage: int, microbatch: int) -> StageMemory:
        is_last = microbatch == len(sizes) - 1
        return (last if last and is_last else found.stages)[stage].memory(microbatch, len(sizes))

    calls = forward.calls
    begins = [module_of(calls[position]) for position in (0, *found.cuts)]
    return PipelinePlan(
        sizes=tuple(sizes),
        schedule=found.schedule,
        cuts=found.cuts,
        calls=calls_digest([node.target for node in calls]),
        stages=tuple(_program(plan, module) for plan, module in zip(found.stages, begins, strict=True)),
        last_stages=tuple(_program(plan, module) for plan, module in zip(last, begins, strict=False)),
        takes_random=any(op.random_state_bytes for plan in found.stages for op in plan.graph.ops),
        budget_bytes=question.budget_bytes,
        step_seconds=found.timeline.step_seconds,
        bubble=found.timeline.bubble,
        peak_bytes=tuple(device_peaks(found.schedule, memory, found.counted_twice)),
    )


def _program(plan: StagePlan, module: str) -> StageProgram:
    return StageProgram(
        digest=graph_digest(plan.capture.graph),
        program=plan.planned.program,
        last_program=None if plan.last is None else plan.last.program,
        separated=tuple(sorted(plan.capture.separated)),
        grid=plan.capture.grid,
        in_flight=plan.in_flight,
        saved_bytes=plan.planned.saved_bytes,
        static_bytes=plan.graph.static_bytes,
        peak_bytes=plan.planned.peak_bytes,
        forward_seconds=plan.planned.forward_seconds,
        backward_seconds=plan.planned.backward_seconds,
        weight_seconds=plan.planned.weight_seconds,
        recompute_seconds=plan.planned.timeline.recompute_seconds,
        begins=module,
    )
