"""From a module and a budget to a plan: capture, profile, plan, check, prove; with the lever `tile` in tiles too.

This is the only way to a plan; `memfit.api`, the fitted module and the command line all use it. A plan that keeps every
bit is made first. Where tiles are allowed and that plan costs time, a plan with tiles is made as well, and the faster
plan is taken.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit import strategies
from memfit.capture.distributed.ddp import bucket_bytes, unwrapped
from memfit.capture.distributed.fsdp import is_sharded
from memfit.capture.eager.backward_autocast import planning_backward
from memfit.capture.failures import told_plainly
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.input_signature import is_same_call, signature
from memfit.capture.state.snapshot import preserved
from memfit.capture.training_step import Capture, device_of
from memfit.compiler.capture_for_sizes import SymbolicCalls, is_for_sizes
from memfit.compiler.carried_plan import KnownSizes, carried_plan
from memfit.compiler.grid_choice import grids
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.plan_cache import (
    is_known_to_have_one_size,
    keep_plan,
    keeps_plans,
    kept_plan,
    note_many_sizes,
    note_need_of_a_plan,
)
from memfit.compiler.proving import for_least, peak_of, prove, proving_step
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import Step, capture_and_profile, check_request, plan_captured, resolve_budget
from memfit.errors import BudgetError, ExactnessError, MemfitError, PlanMismatchError
from memfit.feedback import told_meanwhile
from memfit.planner.effort import search_limit
from memfit.planner.offload.streaming_search import least_streaming
from memfit.refusals import advised, refusal
from memfit.torch_compat.compiler import TorchDynamoException
from memfit.torch_compat.core import user_modes_set_aside
from memfit.units import format_bytes

__all__ = ["make_plan", "plan_profiled"]

log = logging.getLogger(__name__)

_LEAST_TRIES = 3
_MORE = 1.02
"""Factor by which a least budget is raised if no plan is found for it."""

_HINT_SECONDS = 1.0
"""Nominal seconds of a search below which an error leaves out the budget that tiles need: that is another search."""

_GOOD_ENOUGH = 0.01
"""If a plan without tiles has less overhead than this, no plan with tiles is made."""


@user_modes_set_aside()
def make_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    *,
    progress: Progress | None = None,
    keep_call: bool = False,
    known: KnownSizes | None = None,
) -> CompiledPlan:
    """Captures, profiles, plans and proves one training step.

    Args:
        model: module in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        request: budget and other requirements.
        progress: called with the progress; without it, `memfit.feedback` tells.
        keep_call: whether the plan is applied to this module next; it then reuses the call that the proving run
            compiled.
        known: what is known of the module's steps for inputs of other sizes, whose decisions a plan may take over.

    Returns:
        The plan; the model is unchanged.

    Raises:
        SpecError: if the request is invalid.
        CaptureError: if the model cannot be captured.
        BudgetError: if no plan fits.
    """
    request = replace(request, beside_bytes=bucket_bytes(model) or request.beside_bytes)
    model = unwrapped(model)
    device = device_of(model)
    check_request(request, device)
    resolve_budget(request.budget, device)
    inputs = detached(args, kwargs)
    args, kwargs = inputs.args, inputs.kwargs

    def baseline_step() -> None:
        with preserved(model, args, kwargs, request.loss_fn, request.optimizer) as state:
            proving_step(model, args, kwargs, request, state).plain()

    with (
        told_plainly(model, baseline_step),
        planning_backward(in_autocast=request.backward_in_autocast),
        told_meanwhile(request.label or type(model).__name__, progress) as tell,
    ):
        carried = None if known is None else _carried(model, args, kwargs, request, known, tell, keep_call)
        made = functools.partial(_made, model, args, kwargs, request, progress=tell, keep_call=keep_call)
        plan = carried or _for_sizes(made, _calls_for_sizes(model, args, kwargs, request, known))
    if known is not None and known.plans and not known.calls.is_noted:
        known.calls.is_noted = not is_same_call(signature(model, args, kwargs), known.signature)
        if known.calls.is_noted:
            note_many_sizes(model)
    return plan if keep_call else _without_call(plan)


def _carried(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    known: KnownSizes,
    progress: Progress | None,
    keep_call: bool,
) -> CompiledPlan | None:
    """The plan with the decisions of other sizes; the first one of a call for many sizes is proved."""
    found = carried_plan(model, args, kwargs, request, known)
    if found is None:
        return None
    plan, first_of = found
    if first_of is None or not request.prove:
        return plan
    try:
        return prove(model, args, kwargs, plan, progress=progress, keep_call=keep_call)
    except (BudgetError, ExactnessError) as error:
        log.info("the plan of another size does not serve, so that this size is planned from the start: %s", error)
        first_of.is_broken = True
        return None


def _without_call(plan: CompiledPlan) -> CompiledPlan:
    """The same plan without the call that keeps the module alive."""
    assert plan.planned is not None
    return replace(plan, planned=replace(plan.planned, capture=plan.planned.capture.without_call()))


def _calls_for_sizes(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request, known: KnownSizes | None
) -> SymbolicCalls | None:
    """The calls for many sizes that the step may be made from; None where earlier runs had one size: that is faster."""
    if known is None or not is_for_sizes(model, request):
        return None
    budget_bytes = resolve_budget(request.budget, device_of(model))
    if not known.calls.made and is_known_to_have_one_size(model, args, kwargs, request, budget_bytes):
        return None
    return known.calls


def _for_sizes(made: Callable[[SymbolicCalls | None], CompiledPlan], calls: SymbolicCalls | None) -> CompiledPlan:
    """A plan from a call of the module for many sizes, or without such a call where that plan does not serve.

    Args:
        made: makes the plan.
        calls: the calls for many sizes.
    """
    if calls is not None:
        try:
            return made(calls)
        except (ExactnessError, PlanMismatchError, TorchDynamoException) as error:
            if not calls.made:
                raise
            log.info("a call for many sizes does not serve, so that each size is captured by itself: %s", error)
            for call in calls.made:
                call.is_broken = True
    return made(None)


def _made(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    calls: SymbolicCalls | None,
    *,
    progress: Progress | None,
    keep_call: bool,
) -> CompiledPlan:
    """The plan of a checked request."""
    device = device_of(model)
    step = capture_and_profile(model, args, kwargs, request, calls=calls, progress=progress)
    budget_bytes = resolve_budget(request.budget, device, step[1].static_bytes)
    try:
        return plan_profiled(model, args, kwargs, step, request, budget_bytes, progress=progress, keep_call=keep_call)
    except BudgetError as error:
        told = _with_measured_least(error, model, args, kwargs, step, request)
        if not request.tiles:
            told = _with_all_levers(told, model, args, kwargs, step, request)
        if told is error:
            raise
        raise told from error
    except ExactnessError as error:
        without = _without_zeros(request, step[0])
        if without is None:
            raise
        log.info("planned without gradients for what the forward pass leaves behind: %s", error)
        plan = _made(model, args, kwargs, without, calls, progress=progress, keep_call=keep_call and not request.told)
    if not request.told or not step[0].assumed:
        return plan
    # The loop brings gradients that the loss alone does not. The plan without them is exact, so the plan with them is
    # exact too; but with them, the baseline step of the loss alone is another step.
    capture = replace(request.capture, cut_between=without.capture.cut_between)
    with_them = replace(request, capture=capture, told=False, proves_gradients=False)
    return _made(model, args, kwargs, with_them, calls, progress=progress, keep_call=keep_call)


def _without_zeros(request: Request, capture: Capture) -> Request | None:
    """The request for a plan that feeds no zeros where the loss brings no gradient; None if the plan fed none.

    The loss alone brings no gradient to tensors that the model leaves on itself. Zeros there differ from no gradient:
    an infinite derivative turns them into NaN, and a sum with them may have another layout.
    """
    between, asked = bool(capture.unreached), request.capture
    if not asked.cut or not request.proves_gradients:
        return None
    if not capture.assumed and (asked.cut_between or not between):
        return None
    without = replace(asked, without_gradient=asked.without_gradient | capture.assumed, cut_between=between)
    return replace(request, capture=without, told=False)


def plan_profiled(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    step: Step,
    request: Request,
    budget_bytes: int,
    *,
    progress: Progress | None = None,
    keep_call: bool = False,
) -> CompiledPlan:
    """The rest of `make_plan` for a step captured and profiled without tiles; may capture and profile it with tiles.

    Raises:
        BudgetError: if no plan fits.
    """
    device = device_of(model)
    keeps = request.plain and request.prove and keeps_plans() and not is_sharded(model)

    def made(of: Step) -> CompiledPlan:
        known = kept_plan(of, request, budget_bytes, device, signature(model, args, kwargs)) if keeps else None
        if known is not None:
            note_need_of_a_plan(model, args, kwargs, known)
            return known
        plan = plan_captured(model, args, kwargs, *of, request, budget_bytes, progress=progress)
        if not request.prove:
            return plan
        plan = prove(model, args, kwargs, plan, progress=progress, keep_call=keep_call)
        if keeps:
            keep_plan(plan, device)
            note_need_of_a_plan(model, args, kwargs, plan)
        return plan

    errors: list[BudgetError] = []

    def in_tiles() -> CompiledPlan | None:
        """The plan with tiles as coarse as the budget allows, if there is one; records the errors of other grids."""
        for grid in grids(step[0], budget_bytes - step[1].static_bytes - step[1].gradient_bytes):
            tiled = capture_and_profile(model, args, kwargs, request, grid=grid, before=step[0], progress=progress)
            if not tiled[1].is_tiled:
                continue
            try:
                return made(tiled)
            except BudgetError as error:
                errors.append(error)
        return None

    fixed = strategies.grid(request.strategy)
    if fixed:
        return made(capture_and_profile(model, args, kwargs, request, grid=fixed, before=step[0], progress=progress))
    found: list[CompiledPlan] = []
    try:
        found.append(made(step))
    except BudgetError as error:
        if not request.tiles:
            raise
        errors.append(error)
    if request.tiles and all(plan.predicted.overhead >= _GOOD_ENOUGH for plan in found):
        tiled = in_tiles()
        found += [] if tiled is None else [tiled]
    if not found:
        raise min(errors, key=lambda error: error.least_bytes)
    errors.clear()  # the errors hold this call's frame, which holds the errors
    return min(found, key=lambda plan: plan.predicted.step_seconds)


def _with_measured_least(
    error: BudgetError,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    step: Step,
    request: Request,
) -> BudgetError:
    """The same error if a plan is found that fits its least budget, else an error with a budget that a plan fits.

    A search with a time limit may miss an order that an earlier search found, and a run may take more than predicted.
    """
    if not request.prove:
        return error
    least_bytes, peak_bytes = error.least_bytes, 0
    asked = replace(for_least(request, model), prove=False)
    for _ in range(_LEAST_TRIES):
        try:
            plan = plan_profiled(model, args, kwargs, step, asked, least_bytes)
            peak_bytes = peak_of(model, args, kwargs, plan, request)
        except BudgetError as again:
            least_bytes = max(again.least_bytes, int(least_bytes * _MORE))
            continue
        except (MemfitError, torch.OutOfMemoryError) as failure:  # the first error is the one to report
            log.info("cannot measure the least budget: %s", failure)
            return error
        least_bytes = max(least_bytes, peak_bytes)
        break
    if least_bytes <= error.least_bytes:
        return error
    return refusal(
        budget_bytes=error.budget_bytes,
        least_bytes=least_bytes,
        binding=error.binding,
        subject=error.subject,
        missed_bytes=error.missed_bytes + least_bytes - error.least_bytes,
        advice=error.advice,
    )


def _with_all_levers(
    error: BudgetError,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    step: Step,
    request: Request,
) -> BudgetError:
    """The error, with the budget from which on tiling fits, if that is lower."""
    capture, graph = step
    if request.strategy != "auto" or search_limit(request.search_seconds) < _HINT_SECONDS:
        return error
    room = (error.least_bytes - graph.static_bytes - graph.gradient_bytes) // 2
    try:
        _, tiled = capture_and_profile(model, args, kwargs, request, grid=grids(capture, room)[0], before=capture)
    except MemfitError as failure:  # the first error is the one to report
        log.info("cannot tell from where tiling fits: %s", failure)
        return error
    least = least_streaming(tiled, seconds=request.search_seconds) + error.missed_bytes
    if not tiled.is_tiled or least >= error.least_bytes:
        return error
    advice = f'levers="all", the same gradients up to rounding, fits from {format_bytes(least)} ({least} bytes) on'
    return advised(error, advice)
