"""Runs a plan before it is returned: its results must be the baseline step's, and its peak within the budget.

The planner predicts a peak, and a run may take more: workspaces of kernels, an allocator that leaves bytes unused. Then
the next plan is made for less (`memfit.compiler.correction`).

Known limits: the gradients of the baseline step are compared where the step fits in free memory, else only its outputs.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.capture.distributed.fsdp import is_sharded
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import Snapshot, preserved
from memfit.capture.training_step import device_of
from memfit.compiler.consensus import agreed_peak
from memfit.compiler.correction import MOST_PLANS, lowered
from memfit.compiler.perturbed import constant_parameters
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.proof import ProvingStep, StepResult, compare
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import plan_captured
from memfit.device_memory import free_bytes
from memfit.errors import BudgetError
from memfit.ir.residents import ResidentKind, bytes_of
from memfit.planner.analysis.explain import binding_place
from memfit.profiling.memory import Measurement, measure, steady
from memfit.refusals import refusal, refused
from memfit.runtime.executable import PlannedCall, compile_program
from memfit.runtime.loop.forward_passes import Pass
from memfit.sim.simulator import simulate

__all__ = ["for_least", "peak_of", "prove", "proving_step"]

log = logging.getLogger(__name__)


def prove(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    plan: CompiledPlan,
    *,
    progress: Progress | None = None,
    keep_call: bool = False,
) -> CompiledPlan:
    """Runs the plan, compares its results with the baseline step's, and plans for less if the peak exceeds the budget.

    The model, its inputs, the loss and the optimizer stay unchanged, whether the proof succeeds or not.

    Returns:
        The plan with its proof and measured peak; with `keep_call` it keeps the compiled call (`Planned.call`).

    Raises:
        BudgetError: if no correction fits.
        ExactnessError: if the results are not those of the baseline step.
    """
    assert plan.planned is not None
    request = plan.planned.request
    budget_bytes = plan.budget_bytes
    target = budget_bytes
    with preserved(model, args, kwargs, request.loss_fn, request.optimizer) as state:
        step = proving_step(model, args, kwargs, request, state)
        begin = time.perf_counter()
        step, plain = _with_baseline_result(step, plan, device_of(model))
        seconds = time.perf_counter() - begin
        tried_least = False
        for attempt in range(MOST_PLANS):
            assert plan.planned is not None
            if progress is not None:
                progress("prove", attempt, MOST_PLANS)
            call = compile_program(model, plan.planned.capture, plan.program, describe=plan.words())
            found, strayed = _planned_result(step, call)  # compiles
            if step.perturbed and strayed:
                # Code between subgraphs branched on perturbed parameters. The planned branch is the one to prove.
                del found
                step, begin = replace(step, perturbed=()), time.perf_counter()
                plain = _baseline_result(step, plan, device_of(model))
                seconds += time.perf_counter() - begin
                found = step.result(call)
            rounding = plan.is_tiled or request.exact == "rounding"
            proof = compare(step, call, plain, found, rounding=rounding, seconds=seconds) if plain is not None else None
            del found
            peak = _measured_peak(step, plan, call)
            if peak > budget_bytes:  # another thread or garbage that is collected late may have been counted
                state.restore()
                peak = min(peak, _measured_peak(step, plan, call))
            state.restore()
            if progress is not None:
                progress("prove", MOST_PLANS, MOST_PLANS)
            if peak <= budget_bytes:
                planned = replace(plan.planned, call=call) if keep_call else plan.planned
                return replace(plan, budget_bytes=budget_bytes, measured_peak_bytes=peak, proof=proof, planned=planned)
            if attempt == MOST_PLANS - 1:
                break
            # The memory that the model misses is subtracted from the planner's budget.
            target = lowered(target, budget_bytes, measured_bytes=peak, predicted_bytes=plan.predicted.peak_bytes)
            log.info("measured %d bytes, predicted %d; planning for %d", peak, plan.predicted.peak_bytes, target)
            planned = plan.planned
            again = functools.partial(plan_captured, model, args, kwargs, planned.capture, planned.graph)
            try:
                try:
                    plan = again(request, target)
                except BudgetError as error:
                    if tried_least or error.least_bytes > budget_bytes:
                        raise
                    # The plan with the lowest predicted peak may exceed it by less than other plans exceed theirs, and
                    # `BudgetError.least_bytes` was measured with that plan.
                    tried_least = True
                    log.info("planning for %d bytes, the lowest predicted peak", error.least_bytes)
                    plan = again(for_least(request, model), error.least_bytes)
                    plan = replace(plan, planned=planned)
                    target = error.least_bytes
            except BudgetError as error:
                raise refused(error, budget_bytes=budget_bytes, missed_bytes=budget_bytes - target) from error
    assert plan.planned is not None
    timeline = simulate(plan.planned.graph, plan.program)
    raise refusal(
        budget_bytes=budget_bytes,
        least_bytes=peak,
        binding=binding_place(plan.planned.graph, plan.program, timeline),
        missed_bytes=max(0, peak - timeline.peak_bytes),
        advice=f"{MOST_PLANS} plans, each made for less than the one before, took more when they ran; does code of "
        "the model hold more memory with each pass?",
    )


def for_least(request: Request, model: nn.Module) -> Request:
    """The request for the plan that `BudgetError.least_bytes` was measured with.

    On a CPU, any plan with such a low peak will do; fast plans take long to find. CUDA's allocator leaves up to 1 MiB
    unused behind a tensor, and how much depends on the plan.
    """
    return replace(request, any_speed=device_of(model).type == "cpu")


def peak_of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], plan: CompiledPlan, request: Request) -> int:
    """The measured peak of a plan."""
    assert plan.planned is not None
    call = compile_program(model, plan.planned.capture, plan.program)
    with preserved(model, args, kwargs, request.loss_fn, request.optimizer) as state:
        step = proving_step(model, args, kwargs, request, state)
        step.result(call)  # compiles
        return _measured_peak(step, plan, call)


def proving_step(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request, state: Snapshot
) -> ProvingStep:
    """One step of the module on detached inputs, from a state that each run restores."""
    return ProvingStep(
        model=model,
        inputs=detached(args, kwargs),
        loss_fn=request.loss_fn,
        state=state,
        through=is_sharded(model),
    )


def _with_baseline_result(
    step: ProvingStep, plan: CompiledPlan, device: torch.device
) -> tuple[ProvingStep, StepResult | None]:
    """The baseline step's results on perturbed parameters; on the module's own where the perturbed ones fail."""
    constant = () if is_sharded(step.model) else constant_parameters(step.model, step.state)
    if constant:
        try:
            perturbed = replace(step, perturbed=constant)
            plain = _baseline_result(perturbed, plan, device)
            if plain is not None and plain.is_finite:
                return perturbed, plain
        except Exception as error:  # the user's code may check its parameters; unperturbed, it raises its own errors
            log.info("the baseline step refuses perturbed parameters: %s: %s", type(error).__name__, error)
    return step, _baseline_result(step, plan, device)


def _baseline_result(step: ProvingStep, plan: CompiledPlan, device: torch.device) -> StepResult | None:
    """The results of the baseline step, without gradients where these do not fit in free memory or prove nothing.

    None for a sharded module if some process has no room for the step, since all processes run it or none does.
    """
    assert plan.planned is not None
    model, graph = step.model, plan.planned.graph
    if not plan.planned.request.proves_gradients:
        return replace(step.plain(backward=False), other_gradients=True)
    more_bytes = plan.predicted.plain_peak_bytes - graph.static_bytes
    on_host = graph.gradient_bytes if device.type == "cpu" else 0  # results are copied there
    fits = agreed_peak(model, 0 if more_bytes + on_host <= free_bytes(device) else 1) == 0
    if is_sharded(model) and not fits:
        log.warning("the baseline step of the sharded module does not fit in what is free, so no bits are proved")
        return None
    try:
        return step.plain(backward=fits)
    except torch.OutOfMemoryError:
        if not fits or is_sharded(model):
            raise
    return step.plain(backward=False)


def _planned_result(step: ProvingStep, call: PlannedCall) -> tuple[StepResult, bool]:
    """The results of the planned step, and whether its code took another branch than the planned one."""
    here = Pass()
    found = step.result(lambda *args, **kwargs: call.recorded(here, args, kwargs))
    return found, call.strayed(here)


def _measured_peak(step: ProvingStep, plan: CompiledPlan, call: PlannedCall) -> int:
    """Peak of one planned forward and backward pass; existing gradients stay in memory and count."""
    assert plan.planned is not None
    # Memory of code between subgraphs and of libraries is measured here, so it is not part of the start.
    graph, device = plan.planned.graph, device_of(step.model)
    start = graph.static_bytes - bytes_of(graph.residents, ResidentKind.PLAIN_CODE, ResidentKind.LIBRARY)

    def once() -> Measurement:
        return measure(lambda: step.run(call), device=device, warmup=0, repeats=0, start_bytes=start)

    # All ranks of a sharded module run the step equally often, whichever of them compiles.
    measured = once() if is_sharded(step.model) else steady(once)
    return agreed_peak(step.model, measured.peak_bytes)
