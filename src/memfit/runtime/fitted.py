"""The fitted module: the same object, whose call runs a plan while it trains.

`nn.Module` has a slot for a compiled call; the plan goes there. So the module keeps its class, parameters,
hooks and `state_dict`, copies and pickles of it are plain modules, and eval or `no_grad` run the plain code.
Each input signature has its own plan, made at its first call.
"""

from __future__ import annotations

import logging
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.capture.failures import explained
from memfit.capture.loss import AssumedLoss
from memfit.capture.loss_on_values import loss_name
from memfit.capture.own_calls import in_own_call
from memfit.capture.preserve import preserved
from memfit.capture.replicated import bucket_bytes, unwrapped
from memfit.errors import BudgetError, ExactnessError, LossError, MemfitError, PlanMismatchError, SpecError
from memfit.runtime.apply import PlannedCall, compile_program
from memfit.runtime.loops import Loops
from memfit.runtime.module_state import module_state
from memfit.runtime.opaque import make_opaque, not_traced, undisturbed
from memfit.runtime.passes import Pass
from memfit.runtime.plain_calls import nothing_to_train, transformed
from memfit.runtime.signature import Signature, signature
from memfit.step.check import check
from memfit.step.codec import fingerprint_difference, graph_digest
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.capture.loss import LossFunction
    from memfit.capture.unwrapped_optimizer import OptimizerLike
    from memfit.planning import Request
    from memfit.plans import Plan

__all__ = ["Fitted", "fitted_call", "install", "release"]

log = logging.getLogger(__name__)

_PLANNING = threading.RLock()
"""Held while a module is planned: Dynamo, the profiler and the snapshot of a model are for one thread at a time."""

_MOST_STRAYS = 3
"""So often a module is planned again because a step ran otherwise than planned."""


@dataclass(slots=True)
class Fitted:
    """The call of a fitted module.

    Attributes:
        model: the module.
        request: how to plan for another signature.
        plans: by signature.
        last: of the plans that ran, the one made last, also where it is not valid any more.
        calls: by signature, what runs.
        unsigned: a plan from a file that waits for its first call.
        beneath: what was in the slot before: the call that `module.compile()` put there, for calls without a plan.
        loops: how the loop's forward and backward passes follow each other.
        strayed: by signature how often a step ran otherwise than planned.
        told: notices that were given.
    """

    model: weakref.ref[nn.Module]
    request: Request
    plans: dict[Signature, Plan] = field(default_factory=dict)
    last: Plan | None = None
    calls: dict[Signature, PlannedCall] = field(default_factory=dict)
    unsigned: Plan | None = None
    beneath: Callable[..., Any] | None = None
    loops: Loops = field(default_factory=Loops)
    strayed: Counter[Signature] = field(default_factory=Counter)
    told: set[str] = field(default_factory=set)

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan of these inputs; the plain module where nothing is trained, or more is done than training."""
        model = self.model()
        assert model is not None
        if in_own_call():
            return model._call_impl(*args, **kwargs)
        if not model.training or not torch.is_grad_enabled():
            return (self.beneath or model._call_impl)(*args, **kwargs)
        reason = transformed()
        if reason is not None:
            self._tell(f"under {reason}", f"runs plainly under {reason}, without its plan")
            return model._call_impl(*args, **kwargs)
        return self._train(model, args, kwargs)

    @torch.compiler.disable(reason="memfit plans this module; its call is not traced")  # type: ignore[untyped-decorator]
    def _train(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        state = module_state(model)
        if state.substituted:
            self._tell("functional", "runs plainly on tensors put in place of its parameters, without its plan")
            return model._call_impl(*args, **kwargs)
        if nothing_to_train(state, args, kwargs):
            return model._call_impl(*args, **kwargs)
        key = signature(model, args, kwargs, state)
        if key in self.loops.differentiated_twice:
            self._tell("twice", "runs plainly where it is differentiated twice, without its plan")
            return model._call_impl(*args, **kwargs)
        call = self.calls.get(key)
        if call is None or self.loops.outgrown(key):
            call = self._plan_for(model, key, args, kwargs)
        try:
            return self._run(model, key, call, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = getattr(error, "inner_exception", error)
            if not isinstance(failure, PlanMismatchError):
                if isinstance(failure, MemfitError):
                    raise failure from None
                _raise_as_plain(model, args, kwargs)
                raise explained(error, model, start="cannot run the plan") from error
        # Nothing ran: the module's Python state asks for another graph than the planned one.
        log.info("the model changed since it was planned; planning again")
        self._forget(key)
        return self._run(model, key, self._plan_for(model, key, args, kwargs), args, kwargs)

    def _run(self, model: nn.Module, key: Signature, call: PlannedCall, args: Any, kwargs: Any) -> Any:
        here = self.loops.begin(key, type(model).__name__)
        output = call.recorded(here, args, kwargs)
        self.loops.add(here)
        if here.executed != call.pieces or here.strayed:
            self._told_of_stray(model, key, call, here)
        return output

    def _told_of_stray(self, model: nn.Module, key: Signature, call: PlannedCall, here: Pass) -> None:
        """Says that a step ran otherwise than planned, and has it planned again, a few times."""
        self.strayed[key] += 1
        again = self.strayed[key] <= _MOST_STRAYS
        if again:
            self._forget(key)
        self._tell(
            f"strayed {key in self.calls}",
            f"ran {here.executed} of {call.pieces} planned graphs by its plan and the rest plainly, with the same bits "
            "and more memory: its code took another way than when it was planned; "
            + ("it is planned again at its next call" if again else "it changes too often to be planned again"),
        )

    def _forget(self, key: Signature) -> None:
        self.calls.pop(key, None)
        self.plans.pop(key, None)

    def _tell(self, what: str, text: str) -> None:
        """A notice, given once."""
        if what not in self.told:
            self.told.add(what)
            log.warning("%s %s", type(self.model()).__name__, text)

    def _plan_for(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> PlannedCall:
        missed = self.calls.get(key)
        with _PLANNING:
            here = self.calls.get(key)
            if here is not None and here is not missed:
                return here  # another thread planned it meanwhile
            return self._plan_now(model, key, args, kwargs)

    def _plan_now(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> PlannedCall:
        try:
            plan = self._plan(model, key, args, kwargs)
        except (BudgetError, SpecError, ExactnessError):
            raise
        except Exception:
            _raise_as_plain(model, args, kwargs)
            raise
        return self.adopt(model, key, plan)

    def _plan(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> Plan:
        from memfit.making import make_plan

        with undisturbed():
            if self.unsigned is not None:
                waiting, self.unsigned = self.unsigned, None
                return verified(waiting, model, args, kwargs, self.request)
            log.info("planning for inputs %s", key)

            def planned(beside_bytes: int) -> Plan:
                request = replace(self.request, beside_bytes=self.request.beside_bytes + beside_bytes)
                try:
                    return make_plan(model, args, kwargs, request, keep_call=True)
                except LossError as error:
                    return make_plan(model, args, kwargs, self._without_loss(request, error), keep_call=True)

            try:
                return self.loops.plan(key, planned, type(model).__name__, self.plans)
            except BudgetError as error:
                return self._over_budget(model, key, args, kwargs, error)

    def _over_budget(self, model: nn.Module, key: Signature, args: Any, kwargs: Any, error: BudgetError) -> Plan:
        """The leanest plan for a call in the middle of training that does not fit, rather than the end of training.

        Raises:
            BudgetError: the same for the first call of all.
        """
        from memfit.making import make_plan

        if self.last is None:
            raise error
        known = self.plans.get(key)
        if known is not None:  # several passes do not fit together
            self._tell(f"over {key}", f"takes more than its budget: {error}; each pass runs as it was planned alone")
            return known
        self._tell(
            f"over {key}",
            f"takes more than its budget for these inputs, or with these gradients and hooks: {error}; it runs with "
            f"{format_bytes(error.least_bytes)}, the least that works",
        )
        request = replace(self.request, budget=error.least_bytes)
        return make_plan(model, args, kwargs, request, keep_call=True)

    def _without_loss(self, request: Request, error: LossError) -> Request:
        """For another batch in the middle of training, of which a loss bound to one batch's targets knows nothing."""
        log.warning(
            "loss_fn cannot be used to plan for these inputs (%s); planning as if gradients arrived where they did "
            "before; a loss_fn that reads the current targets lets memfit plan with it",
            error,
        )
        before = self.last.planned.capture.loss if self.last is not None and self.last.planned is not None else None
        return replace(request, loss_fn=AssumedLoss(name=loss_name(request.loss_fn), before=before))

    def adopt(self, model: nn.Module, key: Signature, plan: Plan) -> PlannedCall:
        """Runs `plan` for the inputs of this signature from now on."""
        assert plan.planned is not None
        call = plan.planned.call
        if call is None:
            call = compile_program(model, plan.planned.capture, plan.program, describe=plan.__str__)
        self.plans[key] = self.last = replace(plan, planned=replace(plan.planned, call=None))
        self.calls[key] = call
        return call


def install(
    model: nn.Module,
    plan: Plan,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerLike | None = None,
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
    before = model._compiled_call_impl
    fitted.beneath = before.beneath if isinstance(before, Fitted) else before
    make_opaque(Fitted)
    model._compiled_call_impl = fitted
    vars(model)["compile"] = types.MethodType(compile, model)
    return given


def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """What a fitted module has for `nn.Module.compile`, which would put its own call over the plan."""
    call = self._compiled_call_impl
    nn.Module.compile(self, *args, **kwargs)
    if isinstance(call, Fitted):
        call.beneath, self._compiled_call_impl = self._compiled_call_impl, call
        call._tell("compiled", "is fitted: its training steps run by the plan, other calls compiled")


def _raise_as_plain(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises what the plain module raises with these inputs, if it does, with all that happens until then.

    Planning leaves the module as it was. So if an error in it is the module's own, the module runs once more.
    """
    with preserved(model, args, kwargs):
        try:
            model._call_impl(*args, **kwargs)
        except Exception:
            fails = True
        else:
            fails = False
    if fails:
        model._call_impl(*args, **kwargs)


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
    """Makes a fitted module what it was, compiled if it was; a plain one stays as it is."""
    inner = unwrapped(model)
    call = getattr(inner, "_compiled_call_impl", None)
    if isinstance(call, Fitted):
        inner._compiled_call_impl = call.beneath
        vars(inner).pop("compile", None)
    return model
