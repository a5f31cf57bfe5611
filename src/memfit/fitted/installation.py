"""Puts a plan into the slot that `nn.Module` has for a compiled call, finds it there, and takes it out again."""

from __future__ import annotations

import types
import weakref
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from memfit.capture.distributed.ddp import bucket_bytes, unwrapped
from memfit.capture.dynamo.own_calls import in_own_call
from memfit.capture.loss.reading import LossFunction
from memfit.capture.optimizer.unwrapped import OptimizerLike, unwrapped_optimizer
from memfit.capture.state.input_signature import signature
from memfit.capture.training_step import check_step, device_of
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Request
from memfit.compiler.stages import check_request, resolve_budget
from memfit.errors import MemfitError
from memfit.fitted.fitted_module import Advisor, Fitted, Replanner
from memfit.fitted.opaque import make_opaque
from memfit.fitted.plan_from_file import check_module, request_for

__all__ = ["fitted_call", "install", "install_unplanned", "release"]

M = TypeVar("M", bound=nn.Module)


def install(
    model: M,
    plan: CompiledPlan,
    replan: Replanner,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | None = None,
) -> M:
    """Puts a plan into a module; see `memfit.fitted.plan.Plan.apply`.

    Args:
        model: the module, perhaps inside a wrapper.
        plan: a plan for it.
        replan: makes plans for inputs of another signature.
        loss_fn: loss of the loop, for a plan from a file.
        optimizer: optimizer of the loop, for a plan from a file.

    Returns:
        The given object.

    Raises:
        PlanMismatchError: if the plan is for another module.
    """
    given, inner = model, unwrapped(model)
    if plan.planned is not None:
        request = replace(plan.planned.request, budget=plan.budget_bytes)
    else:
        request = request_for(plan, loss_fn=loss_fn, optimizer=optimizer, beside_bytes=bucket_bytes(given))
    check_module(plan, inner)
    fitted = Fitted(weakref.ref(inner), request, replan)
    if plan.planned is None:
        fitted.unsigned = plan
    else:
        fitted.adopt(inner, plan.planned.signature, plan)
    _put(inner, fitted)
    return given


def install_unplanned(
    model: M, request: Request, replan: Replanner, *, gives_up: bool = False, advise: Advisor | None = None
) -> M:
    """Puts the slot of a plan into a module, which is planned at its first training call.

    A request without an optimizer gets the one that trains the module then.

    Args:
        model: the module, perhaps inside a wrapper.
        request: what a plan must fulfil.
        replan: makes plans.
        gives_up: whether a module that cannot be planned runs as it is, with a warning, instead of an error.
        advise: finds a remedy where the first call does not fit.

    Returns:
        The given object.
    """
    inner = unwrapped(model)
    check_request(request, device_of(inner))
    resolve_budget(request.budget, device_of(inner))
    request = replace(request, beside_bytes=request.beside_bytes + bucket_bytes(model))
    fitted = Fitted(weakref.ref(inner), request, replan, gives_up=gives_up, advise=advise)
    fitted.finds_optimizer = request.optimizer is None
    _put(inner, fitted)
    optimizer = unwrapped_optimizer(request.whole_optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        _tell_if_passed_by(inner, optimizer)
    return model


def _tell_if_passed_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Has a warning given if the first step of the optimizer finds gradients that no call in training mode made."""
    held = weakref.ref(model)

    def stepped(_: torch.optim.Optimizer, *__: Any) -> None:
        if in_own_call():
            return
        handle.remove()
        trained = held()
        call = None if trained is None else getattr(trained, "_compiled_call_impl", None)
        if trained is None or not isinstance(call, Fitted) or call.seen:
            return
        if all(p.grad is None for p in trained.parameters()):
            return
        call.tell(
            "passed by",
            "was trained without a call of the module in training mode, so its steps are not planned; memfit plans "
            "calls after model.train(), and model(x), not model.forward(x)",
        )

    handle = optimizer.register_step_post_hook(stepped)


def fits_plainly(model: nn.Module, args: Any, kwargs: Any, request: Request, replan: Replanner) -> bool:
    """Fits a module whose call with these inputs needs no plan; returns False if it needs one.

    Args:
        model: the module, perhaps inside a wrapper.
        args: positional inputs.
        kwargs: keyword inputs.
        request: what a plan must fulfil.
        replan: makes plans for other inputs.
    """
    inner = unwrapped(model)
    request = replace(request, beside_bytes=bucket_bytes(model))
    check_request(request, device_of(inner))
    fitted = Fitted(weakref.ref(inner), request, replan)
    check_step(inner, args, kwargs, checkpointing=request.capture.checkpointing)
    if not fitted.fits_plainly(inner, signature(inner, args, kwargs), args, kwargs):
        return False
    _put(inner, fitted)
    return True


def _put(model: nn.Module, fitted: Fitted) -> None:
    before = model._compiled_call_impl
    fitted.beneath = before.beneath if isinstance(before, Fitted) else before
    make_opaque(Fitted)
    model._compiled_call_impl = fitted
    vars(model)["compile"] = types.MethodType(compile, model)


def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces `nn.Module.compile` on a fitted module, since the original would overwrite the plan."""
    call = self._compiled_call_impl
    nn.Module.compile(self, *args, **kwargs)
    if isinstance(call, Fitted):
        call.beneath, self._compiled_call_impl = self._compiled_call_impl, call
        call.tell("compiled", "is fitted: its training steps run by the plan, other calls compiled")


def fitted_call(model: nn.Module) -> Fitted:
    """The call that `install` put on the module.

    Raises:
        MemfitError: if the module is not fitted.
    """
    call = getattr(unwrapped(model), "_compiled_call_impl", None)
    if not isinstance(call, Fitted):
        raise MemfitError(f"{type(model).__name__} is not fitted; call memfit.fit(model, ...) first")
    return call


def release(model: M) -> M:
    """Restores the call that a fitted module had before, compiled or not; a plain module stays as it is."""
    inner = unwrapped(model)
    call = getattr(inner, "_compiled_call_impl", None)
    if isinstance(call, Fitted):
        inner._compiled_call_impl = call.beneath
        vars(inner).pop("compile", None)
    return model
