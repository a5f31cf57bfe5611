"""The fitted module: the same object, whose call runs a plan while the module trains.

`nn.Module` has a slot for a compiled call, and the plan is stored there. So the module keeps its class, parameters,
hooks and `state_dict`; copies and pickles of it are plain modules; and eval or `no_grad` run the plain code. Each input
signature has its own plan, made at the first call with that signature.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.dynamo.own_calls import in_own_call
from memfit.capture.eager.backward_autocast import planning_backward
from memfit.capture.failures import explained
from memfit.capture.loss.reading import AssumedLoss, loss_name
from memfit.capture.optimizer.live import live_optimizer
from memfit.capture.state.input_signature import Signature, nearest, signature
from memfit.capture.state.module_state import module_state
from memfit.capture.state.snapshot import preserved
from memfit.capture.training_step import device_of
from memfit.compiler.capture_for_sizes import SymbolicCalls
from memfit.compiler.carried_plan import KnownSizes
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Planned, Request
from memfit.errors import BudgetError, LossError, MemfitError, PlanMismatchError, SpecError
from memfit.fitted.held_outputs import HeldOutputs
from memfit.fitted.opaque import not_traced, undisturbed
from memfit.fitted.plain_calls import nothing_to_train, transformed
from memfit.fitted.plain_steps import PlainStep, PlainSteps, step_of
from memfit.fitted.plan_from_file import verified
from memfit.fitted.training_loops import Loops, TogetherError
from memfit.fitted.variants import Variants, decides
from memfit.fitted.varying_numbers import varying_number
from memfit.refusals import advised
from memfit.runtime.executable import PlannedCall, compile_program
from memfit.runtime.loop.forward_passes import Pass, in_flight
from memfit.torch_compat.compiler import TorchDynamoException
from memfit.units import format_bytes

__all__ = ["Fitted", "Replanner"]

log = logging.getLogger(__name__)

_PLANNING = threading.RLock()
"""Lock held while a module is planned: Dynamo, the profiler and a model's snapshot allow one thread at a time."""

_MOST_STRAYS = 3
"""Maximum number of times a module is planned again because a step did not run as planned."""


Replanner = Callable[[nn.Module, Any, Any, Request, KnownSizes | None], CompiledPlan]
"""Makes a plan of a module, its positional and keyword inputs and a request, with the call that the plan needs; it is
told of steps for other sizes of the inputs."""

Advisor = Callable[[nn.Module, Any, Any, Request], str]
"""Finds a remedy for a call that does not fit; returns an empty string if it finds none."""


@dataclass(slots=True)
class Fitted:
    """The call of a fitted module.

    Attributes:
        model: the module.
        request: the request to plan for another signature.
        replan: makes a plan for other inputs.
        plans: the plans, by signature.
        calls: the planned calls, by signature.
        variants: the paths that branches on inputs took.
        unsigned: a plan from a file that waits for its first call.
        beneath: previous content of the slot: the call that `module.compile()` put there, for calls without a plan.
        loops: the order of the loop's forward and backward passes.
        held: outputs of earlier passes that the loop still holds.
        fitting: the steps that need no plan, because the baseline step fits.
        latest: the plan that was made last.
        stale: signatures to be planned again, whose plan is used until then.
        changed: signatures whose plan does not run any more, because the module has changed.
        strayed: by signature, how often a step did not run as planned.
        failed: by signature, how often planning or planning again failed.
        plain: signatures that run as plain code because planning failed.
        told: warnings that were given.
        gives_up: whether a module that cannot be planned at its first call runs as it is, instead of an error.
        symbolic: calls of the module that were compiled for many sizes.
        carried: the steps whose plans were made from those of other sizes; their first runs are watched.
        seen: signatures of calls so far.
        advise: finds a remedy where not even the first call of all fits, such as a smaller batch; it may find none.
        finds_optimizer: whether the optimizer is still to be found, among the objects that exist at a call.
        most_plans: maximum number of plans; each takes about 10 MiB of host memory for a GPT-2 of 6 layers.
    """

    model: weakref.ref[nn.Module]
    request: Request
    replan: Replanner
    plans: dict[Signature, CompiledPlan] = field(default_factory=dict)
    calls: dict[Signature, PlannedCall] = field(default_factory=dict)
    variants: Variants = field(default_factory=Variants)
    unsigned: CompiledPlan | None = None
    beneath: Callable[..., Any] | None = None
    loops: Loops = field(default_factory=Loops)
    held: HeldOutputs = field(default_factory=HeldOutputs)
    fitting: PlainSteps = field(default_factory=PlainSteps)
    latest: CompiledPlan | None = None
    stale: set[Signature] = field(default_factory=set)
    changed: set[Signature] = field(default_factory=set)
    strayed: Counter[Signature] = field(default_factory=Counter)
    failed: Counter[Signature] = field(default_factory=Counter)
    plain: set[Signature] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    gives_up: bool = False
    symbolic: SymbolicCalls = field(default_factory=SymbolicCalls)
    carried: dict[Signature, PlainStep] = field(default_factory=dict)
    seen: set[Signature] = field(default_factory=set)
    advise: Advisor | None = None
    finds_optimizer: bool = False
    most_plans: int = 64

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan of these inputs, or the plain module where nothing trains or a transform acts on the call."""
        model = self.model()
        assert model is not None
        if in_own_call():
            return model._call_impl(*args, **kwargs)
        if self.fitting.watch is not None:
            self._end_watch(model)
        if not model.training or not torch.is_grad_enabled():
            return (self.beneath or model._call_impl)(*args, **kwargs)
        reason = transformed()
        if reason is not None:
            self.tell(f"under {reason}", f"runs plainly under {reason}, without its plan")
            return model._call_impl(*args, **kwargs)
        return self._train(model, args, kwargs)

    @torch.compiler.disable(reason="memfit plans this module; its call is not traced")  # type: ignore[untyped-decorator]
    def _train(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        state = module_state(model)
        if state.substituted:
            self.tell("functional", "runs plainly on tensors put in place of its parameters, without its plan")
            return model._call_impl(*args, **kwargs)
        if nothing_to_train(state, args, kwargs):
            return model._call_impl(*args, **kwargs)
        key = self.variants.signature(signature(model, args, kwargs, state), self.calls, model, args, kwargs)
        if key not in self.seen:
            self._begin_size(model, key, args, kwargs)
        if key in self.loops.differentiated_twice:
            self.tell("twice", "runs plainly where it is differentiated twice, without its plan")
            return model._call_impl(*args, **kwargs)
        if key in self.plain:
            return model._call_impl(*args, **kwargs)
        if self.request.plain and key not in self.calls and self.fits_plainly(model, key, args, kwargs):
            self.fitting.begin(key, self.fitting.known[key], device_of(model))
            return (self.beneath or model._call_impl)(*args, **kwargs)
        if self.loops.is_otherwise(key, self._planned(key)) or self._holds_more(model, key, args, kwargs):
            self.stale.add(key)
        call = self.calls.get(key)
        if len(self.plans) == self.most_plans and key in self.plans:
            self.plans[key] = self.plans.pop(key)  # the order of their last use
        if call is None or key in self.stale or self.loops.outgrown(key):
            call = self._plan_for(model, key, args, kwargs)
        if call is None:
            return model._call_impl(*args, **kwargs)
        try:
            return self._run(model, key, call, args, kwargs)
        except (TorchDynamoException, PlanMismatchError) as error:
            failure = getattr(error, "inner_exception", error)
            if not isinstance(failure, PlanMismatchError):
                if isinstance(failure, MemfitError):
                    raise failure from None
                _raise_as_plain(model, args, kwargs)
                raise explained(error, model, start="cannot run the plan") from error
        # No op ran: with its present Python state the module needs another graph than the planned one.
        self.tell("changed", f"changed since it was planned and needs another plan ({str(failure).partition(';')[0]})")
        self.stale.add(key)
        self.changed.add(key)
        another = self._plan_for(model, key, args, kwargs)
        if another is None or another is call:
            return model._call_impl(*args, **kwargs)
        return self._run(model, key, another, args, kwargs)

    def _begin_size(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> None:
        """Takes over what is known of the nearest size, before the first step of a size."""
        self.seen.add(key)
        if self.finds_optimizer and (found := live_optimizer(model, device_of(model).type)) is not None:
            self.finds_optimizer = False
            self.request = replace(self.request, optimizer=found)
        for known in nearest(key, self.plans)[:1]:
            self.loops.inherit(key, known)
        if (name := varying_number(key, self.plans, args, kwargs)) is not None:
            self.tell(
                f"number {name}",
                f"is called with many numbers as {name}, and each is planned, which takes about a second; passed as a "
                "tensor, all have one plan",
            )

    def _end_watch(self, model: nn.Module) -> None:
        """Ends the watch of the step before, which ran without a plan, when the module is called again."""
        key = None if self.fitting.watch is None else self.fitting.watch.key
        peak_bytes = self.fitting.end(device_of(model))
        if peak_bytes and key in self.plans:
            assert key is not None
            self.stale.add(key)
            self.changed.add(key)
            self.tell(
                f"more than scaled {key}",
                f"took {format_bytes(peak_bytes)} in a step whose plan was made from that of another size, more than "
                "predicted and more than its budget; the next such step is planned from the start",
            )
        elif peak_bytes:
            self.tell(
                "over without a plan",
                f"took {format_bytes(peak_bytes)} in a step without a plan, more than predicted and more than its "
                "budget; steps with such inputs are planned from here on",
            )

    def fits_plainly(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> bool:
        """Whether a call runs without a plan, because the baseline step fits."""
        if key in self.fitting.known or key in self.fitting.over:
            return key in self.fitting.known
        if not self.fitting.covers(key) and nearest(key, self.plans):
            return False  # a plan for another size is at hand, which takes less time than a count
        with _PLANNING, undisturbed():
            step = self.fitting.of(key, model, args, kwargs, self.request)
        if step is not None:
            log.info("%s", step.as_plan().summary())
        return step is not None

    def _run(self, model: nn.Module, key: Signature, call: PlannedCall, args: Any, kwargs: Any) -> Any:
        if key in self.carried:
            self.fitting.begin(key, self.carried[key], device_of(model))
        here = self.loops.begin(key, type(model).__name__)
        output = call.recorded(here, args, kwargs)
        self.loops.add(here)
        if self.held.is_looking(key):
            self.held.remember(model, (args, kwargs), output)
        if call.strayed(here):
            self._told_of_stray(model, key, call, here)
        return output

    def _holds_more(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> bool:
        """Whether the loop holds outputs of the previous pass that the plan has no room for, as found now."""
        if not self.held.is_looking(key) or in_flight(self.loops.passes):
            return False
        return self.held.outgrown(key, model, (args, kwargs), self.plans.get(key))

    def _told_of_stray(self, model: nn.Module, key: Signature, call: PlannedCall, here: Pass) -> None:
        """Warns that a step did not run as planned, and marks it to be planned again, a limited number of times."""
        self.strayed[key] += 1
        again = self.strayed[key] <= _MOST_STRAYS and not self.failed[key]
        if again:
            self.stale.add(key)
        more = here.executed - call.subgraphs
        ran = f"{here.executed} of its {call.subgraphs} planned graphs" if more < 0 else "graphs"
        what = (
            f"ran {ran} by the plan and others plainly"
            if more < 0 or here.strayed
            else (f"ran planned graphs {here.executed} times, where its plan has {call.subgraphs} runs")
        )
        self.tell(
            f"strayed {self.strayed[key] if again else 'too often'}",
            f"{what}, with the same bits and other memory than planned: its code took another way than when it was "
            "planned; "
            + ("it is planned again at its next call" if again else "it changes too often to be planned again"),
        )

    def tell(self, what: str, text: str) -> None:
        """Logs a warning once."""
        if what not in self.told:
            self.told.add(what)
            log.warning("%s %s", type(self.model()).__name__, text)

    def _plan_for(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> PlannedCall | None:
        """The call of a new plan; the present call if planning fails, None if there is no call at all."""
        missed = self.calls.get(key)
        with _PLANNING:
            here = self.calls.get(key)
            if here is not None and here is not missed:
                return here  # another thread planned it meanwhile
            return self._plan_now(model, key, args, kwargs)

    def _planned(self, key: Signature) -> Planned | None:
        return self.plans[key].planned if key in self.plans else None

    def _as_the_loop(self, key: Signature, **more: Any) -> Request:
        """The request, adapted to the observed behaviour of the loop."""
        return self.loops.request(key, self.request, self._planned(key), decide=decides(key), **more)

    def _plan_now(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> PlannedCall | None:
        try:
            plan = self._plan(model, key, args, kwargs)
        except SpecError:
            raise
        except Exception as error:
            if not isinstance(error, BudgetError):
                _raise_as_plain(model, args, kwargs)
            goes_on = self.latest is not None or (self.gives_up and not isinstance(error, BudgetError))
            if not goes_on or not isinstance(error, MemfitError):
                raise
            return self._unplanned(key, error)
        return self.adopt(model, key, plan)

    def _unplanned(self, key: Signature, error: MemfitError) -> PlannedCall | None:
        """The call for a step that cannot be planned, so that training goes on; None if the step runs as plain code."""
        self.stale.discard(key)
        self.failed[key] += 1
        call = self.calls.get(key)
        if call is None or self.failed[key] >= _MOST_STRAYS:
            self.plain.add(key)
        self.tell(
            f"failed {key}",
            "cannot be planned for these inputs, or for the way its code takes now, so what is not planned runs "
            f"plainly, with the same bits and maybe over the budget: {error}",
        )
        return call

    def _plan(self, model: nn.Module, key: Signature, args: Any, kwargs: Any) -> CompiledPlan:
        with undisturbed():
            if self.unsigned is not None:
                waiting, self.unsigned = self.unsigned, None
                return verified(waiting, model, args, kwargs, self.request)
            log.info("planning for inputs %s", key)
            if not decides(key):
                self.tell(
                    "ways",
                    "has branches on its inputs that go many ways, or on buffers that change, each planned when it was "
                    "first taken; from here on other ways run by one plan in subgraphs around these branches",
                )

            def planned(beside_bytes: int) -> CompiledPlan:
                beside_bytes += self.request.beside_bytes
                request = self._as_the_loop(key, beside_bytes=beside_bytes)
                return self._made(model, args, kwargs, request, self._of_other_sizes(key))

            def beside_outputs(room_bytes: int) -> CompiledPlan:
                name = type(model).__name__
                return self.loops.plan(key, lambda others: planned(room_bytes + others), name, self.plans)

            try:
                return self.held.plan(key, beside_outputs)
            except BudgetError as error:
                return self._over_budget(model, key, args, kwargs, error)

    def _of_other_sizes(self, key: Signature) -> KnownSizes | None:
        """What a plan for these inputs may take over; None if the module has changed."""
        if key in self.changed:
            return None
        is_new = key not in self.plans or key in self.carried
        plans = [self.plans[other] for other in nearest(key, self.plans)] if is_new else []
        return KnownSizes(plans=plans, calls=self.symbolic)

    def _made(
        self, model: nn.Module, args: Any, kwargs: Any, request: Request, known: KnownSizes | None = None
    ) -> CompiledPlan:
        try:
            return self.replan(model, args, kwargs, request, known)
        except LossError as error:
            return self.replan(model, args, kwargs, self._without_loss(request, error), known)

    def _over_budget(
        self, model: nn.Module, key: Signature, args: Any, kwargs: Any, error: BudgetError
    ) -> CompiledPlan:
        """The plan with the least memory for a call that does not fit, so that training goes on.

        Raises:
            BudgetError: the given error, at the first call of all, or where several tries find no plan.
        """
        if self.latest is None:
            raise self._with_advice(model, args, kwargs, error)
        least_bytes = error.least_bytes
        plan = error.plan if isinstance(error, TogetherError) else None
        if plan is not None or (key in self.plans and key not in self.stale):  # several passes do not fit together
            least = "about that much" if plan is not None else "the least that works for each"
            self.tell(f"over {key}", f"takes more than its budget: {error}; the passes run with {least}")
            if plan is not None:
                return plan
            least_bytes = 1  # the least budget of one pass is not known yet
        else:
            self.tell(
                f"over {key}",
                f"takes more than its budget for these inputs, or with these gradients and hooks: {error}; it runs "
                f"with {format_bytes(error.least_bytes)}, the least that works",
            )
        for _ in range(_MOST_STRAYS):
            try:
                return self._made(model, args, kwargs, self._as_the_loop(key, budget=least_bytes))
            except BudgetError as more:
                error, least_bytes = more, more.least_bytes
        raise error

    def _with_advice(self, model: nn.Module, args: Any, kwargs: Any, error: BudgetError) -> BudgetError:
        advice = "" if self.advise is None else self.advise(model, args, kwargs, self.request)
        return advised(error, advice) if advice else error

    def _without_loss(self, request: Request, error: LossError) -> Request:
        """The request for a later batch, for which a loss that is bound to the targets of one batch cannot be used."""
        self.tell(
            "loss",
            f"is planned without its loss_fn, which cannot be used to plan for these inputs ({error}); gradients are "
            "taken to arrive where they did before; a loss_fn that reads the current targets lets memfit plan with it",
        )
        earlier = self.latest
        before = earlier.planned.capture.loss if earlier is not None and earlier.planned is not None else None
        return replace(request, loss_fn=AssumedLoss(name=loss_name(request.loss_fn), before=before))

    def adopt(self, model: nn.Module, key: Signature, plan: CompiledPlan) -> PlannedCall:
        """Uses `plan` for the inputs of this signature from now on."""
        assert plan.planned is not None
        call = plan.planned.call
        if call is None:
            with planning_backward(in_autocast=plan.planned.request.backward_in_autocast):
                call = compile_program(model, plan.planned.capture, plan.program, describe=plan.words())
        if plan.planned.is_measured:
            self.carried.pop(key, None)
        else:
            self.carried[key] = step_of(plan)
        self.plans[key] = self.latest = replace(plan, planned=replace(plan.planned, call=None))
        self.calls[key] = call
        self.stale.discard(key)
        self.changed.discard(key)
        if len(self.calls) > self.most_plans:
            self._forget(key)
        return call

    def _forget(self, present: Signature) -> None:
        """Drops the plan that was not used for longest, of those that were made from others if there are any."""
        oldest = next(key for key in [*filter(self.carried.__contains__, self.plans), *self.plans] if key != present)
        del self.plans[oldest], self.calls[oldest]
        self.carried.pop(oldest, None)
        self.seen.discard(oldest)
        self.tell(
            "forgets",
            f"keeps the plans of the {self.most_plans} input signatures that were used last; others are planned again "
            "when they come back",
        )


def _raise_as_plain(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises the error of the plain module with these inputs, if there is one, with all side effects until then.

    Planning leaves the module unchanged. So if an error in planning is the module's own, the module runs once more.
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
