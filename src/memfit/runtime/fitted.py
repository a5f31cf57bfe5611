"""The fitted module: the same object, whose call runs a plan while it trains.

`nn.Module` has a slot for a compiled call; the plan goes there. So the module keeps its class, parameters,
hooks and `state_dict`, copies and pickles of it are plain modules, and eval or `no_grad` run the plain code.
Each input signature has its own plan, made at its first call.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.capture.dynamo import preserved_state
from memfit.capture.failures import explained
from memfit.capture.replicated import bucket_bytes, unwrapped
from memfit.errors import MemfitError, PlanMismatchError
from memfit.runtime.apply import PlannedCall, compile_program
from memfit.runtime.signature import Signature, signature
from memfit.step.check import check
from memfit.step.codec import fingerprint_difference, graph_digest

if TYPE_CHECKING:
    from memfit.capture.loss import LossFunction
    from memfit.planning import Request
    from memfit.plans import Plan

__all__ = ["Fitted", "fitted_call", "install", "release"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fitted:
    """The call of a fitted module.

    Attributes:
        model: the module.
        request: how to plan for another signature.
        plans: by signature.
        calls: by signature, what runs.
        unsigned: a plan from a file that waits for its first call.
    """

    model: weakref.ref[nn.Module]
    request: Request
    plans: dict[Signature, Plan] = field(default_factory=dict)
    calls: dict[Signature, PlannedCall] = field(default_factory=dict)
    unsigned: Plan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan of these inputs; the plain module where nothing is trained."""
        model = self.model()
        assert model is not None
        if not model.training or not torch.is_grad_enabled():
            return model._call_impl(*args, **kwargs)
        key = signature(model, args, kwargs)
        call = self.calls.get(key)
        if call is None:
            call = self._plan_for(model, key, args, kwargs)
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = getattr(error, "inner_exception", error)
            if not isinstance(failure, PlanMismatchError):
                if isinstance(failure, MemfitError):
                    raise failure from None
                with preserved_state(model):
                    model._call_impl(*args, **kwargs)  # raises the user's own error
                raise explained(error, model, start="cannot run the plan") from error
        # Nothing ran: the module's Python state asks for another graph than the planned one.
        log.info("the model changed since it was planned; planning again")
        self.calls.pop(key, None)
        self.plans.pop(key, None)
        return self._plan_for(model, key, args, kwargs)(*args, **kwargs)

    def _plan_for(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> PlannedCall:
        from memfit.making import make_plan

        if self.unsigned is not None:
            waiting, self.unsigned = self.unsigned, None
            return self.adopt(model, key, verified(waiting, model, args, kwargs, self.request))
        log.info("planning for inputs %s", key)
        return self.adopt(model, key, make_plan(model, args, kwargs, self.request, keep_call=True))

    def adopt(self, model: nn.Module, key: Signature, plan: Plan) -> PlannedCall:
        """Runs `plan` for the inputs of this signature from now on."""
        assert plan.planned is not None
        call = plan.planned.call
        if call is None:
            call = compile_program(model, plan.planned.capture, plan.program, describe=plan.__str__)
        self.plans[key] = replace(plan, planned=replace(plan.planned, call=None))
        self.calls[key] = call
        return call


def install(
    model: nn.Module,
    plan: Plan,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Puts a plan into a module; see `memfit.plans.Plan.apply`."""
    from memfit.planning import Request, fingerprint

    given, model = model, unwrapped(model)
    if plan.planned is not None:
        request = replace(plan.planned.request, budget=plan.budget_bytes)
    else:
        tiers = ",".join(map(str, plan.program.tiers())) or None
        request = Request(
            budget=plan.budget_bytes,
            loss_fn=loss_fn,
            optimizer=optimizer,
            strategy=plan.strategy,
            levers="all" if plan.is_tiled else "bitwise",
            tiers=tiers,
            beside_bytes=bucket_bytes(given),
        )
    here = fingerprint(model, (), {})
    difference = fingerprint_difference(
        {k: v for k, v in plan.fingerprint.items() if k != "inputs"}, {k: v for k, v in here.items() if k != "inputs"}
    )
    if difference:
        raise PlanMismatchError("the plan is for something else: " + "; ".join(line[:300] for line in difference))
    fitted = Fitted(weakref.ref(model), request)
    if plan.planned is None:
        fitted.unsigned = plan
    else:
        fitted.adopt(model, plan.planned.signature, plan)
    model._compiled_call_impl = fitted
    return given


def verified(plan: Plan, model: nn.Module, args: Any, kwargs: Any, request: Request) -> Plan:
    """A plan from a file, with the capture it needs to run.

    Raises:
        PlanMismatchError: if the step is not the planned one.
        ProgramError: if the program is not one of the step.
    """
    from memfit.planning import Planned, capture_and_profile, fingerprint

    difference = fingerprint_difference(plan.fingerprint, fingerprint(model, args, kwargs))
    capture, graph = capture_and_profile(model, args, kwargs, request, grid=plan.grid)
    if difference or graph_digest(graph) != plan.graph_digest:
        what = "; ".join(line[:300] for line in difference) or "the captured graph differs"
        raise PlanMismatchError(f"the plan is for something else: {what}")
    check(graph, plan.program)
    return replace(
        plan, planned=Planned(capture=capture, graph=graph, request=request, signature=signature(model, args, kwargs))
    )


def fitted_call(model: nn.Module) -> Fitted:
    """What `install` put there.

    Raises:
        MemfitError: if the module is not fitted.
    """
    call = getattr(unwrapped(model), "_compiled_call_impl", None)
    if not isinstance(call, Fitted):
        raise MemfitError(f"{type(model).__name__} is not fitted; call memfit.fit(model, ...) first")
    return call


def release(model: nn.Module) -> nn.Module:
    """Makes a fitted module plain again; a plain one stays as it is."""
    inner = unwrapped(model)
    if isinstance(getattr(inner, "_compiled_call_impl", None), Fitted):
        inner._compiled_call_impl = None
    return model
