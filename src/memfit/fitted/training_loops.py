"""Behaviour of the caller's loop: the forward passes that it runs before a backward pass, learned from its steps.

A plan is made for a forward pass and its backward pass. Contrastive and siamese losses, and some trainers of
adversarial networks, run several forward passes and then run backward through all of them: the saved tensors of each
pass stay in memory while the others run. So memfit counts the passes whose backward pass has not run. If a step has
more of them than planned, a warning is logged, and the next step is planned with the memory of the other passes added
to its own (`Request.beside_bytes`). This is a fixed point: the next pass cannot use the bytes that one pass holds.

Idea: gradient caching (Gao et al., 2021, GradCache) treats such losses by a second forward pass for each part; here the
loop stays unchanged and the passes share the budget.

Autograd adds up the gradients of all uses of a parameter in all passes one after the other. So the next plan returns
the gradient of each use separately (`memfit.capture.gradients.shared_inputs`); passes that have run already are
recomputed (`memfit.runtime.loop.gradient_terms`).

Known limits: the first step with more passes than planned may exceed the budget. All passes of one signature have one
plan.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.capture.state.input_signature import Signature
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Planned, Request
from memfit.errors import BudgetError
from memfit.ir.residents import ResidentKind, bytes_of
from memfit.runtime.loop.forward_passes import Pass, in_flight
from memfit.sim.simulator import simulate
from memfit.units import format_bytes

__all__ = ["Loops", "TogetherError", "held_bytes"]

log = logging.getLogger(__name__)

_MOST_TRIES = 5
_CLOSE_ENOUGH = 0.05
"""Share of the budget by which the room set aside for other passes may exceed the bytes that they hold."""


class TogetherError(BudgetError):
    """Several passes do not fit together.

    Attributes:
        plan: the plan of one pass with which all passes together need the least memory found; None if none was found.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int, plan: CompiledPlan | None) -> None:
        super().__init__(message, budget_bytes=budget_bytes, least_bytes=least_bytes)
        self.plan = plan


@dataclass(slots=True)
class Loops:
    """Observed behaviour of the training loops that call a fitted module.

    Attributes:
        passes: passes whose backward pass has not run.
        beside: by signature, the other passes seen in flight with such a pass, the largest number of each signature.
        planned_beside: `beside` at the time when the plans were made.
        widened: signatures whose calls are planned with all outputs, because a cut output got a gradient.
        narrowed: see `Pass`.
        regions: see `Pass`.
        apart: signatures whose calls are planned with gradients use by use, because other code adds to them.
        rounded: see `Pass`.
        turned: see `Pass`.
        differentiated_twice: signatures whose calls run as plain code because they are differentiated twice.
    """

    passes: list[weakref.ref[Pass]] = field(default_factory=list)
    beside: dict[Signature, Counter[Signature]] = field(default_factory=dict)
    planned_beside: dict[Signature, Counter[Signature]] = field(default_factory=dict)
    widened: set[Signature] = field(default_factory=set)
    narrowed: dict[Signature, frozenset[int]] = field(default_factory=dict)
    regions: set[tuple[Signature, bool]] = field(default_factory=set)
    apart: set[Signature] = field(default_factory=set)
    rounded: set[Signature] = field(default_factory=set)
    turned: set[Signature] = field(default_factory=set)
    differentiated_twice: set[Signature] = field(default_factory=set)

    def begin(self, key: Signature, name: str) -> Pass:
        """A record for a forward pass that is about to run; notes the other passes in flight.

        Args:
            key: signature of the pass.
            name: of the module.
        """
        others = in_flight(self.passes)
        if others:
            self._note(Counter([key, *(one.key for one in others)]), name)
        return Pass(
            key=key,
            refused=self.differentiated_twice,
            widened=self.widened,
            narrowed=self.narrowed,
            regions=self.regions,
            apart=self.apart,
            rounded=self.rounded,
            turned=self.turned,
            shares_casts=bool(others) and _in_autocast_region(),
        )

    def add(self, here: Pass) -> None:
        """Counts a pass that has run and waits for its backward pass."""
        if here.waiting:
            self.passes.append(weakref.ref(here))

    def inherit(self, key: Signature, known: Signature) -> None:
        """Takes what was observed of passes of one size as what is known of another size, which has not run yet."""
        for group in (self.widened, self.apart, self.rounded, self.turned, self.differentiated_twice):
            if known in group:
                group.add(key)
        if known in self.narrowed:
            self.narrowed.setdefault(key, self.narrowed[known])
        self.regions |= {(key, inside) for one, inside in self.regions if one == known}

    def outgrown(self, key: Signature) -> bool:
        """Whether a signature had more other passes in flight than planned for, and can be planned for these now."""
        known = self.beside.get(key)
        if known is None or known == self.planned_beside.get(key):
            return False
        now = Counter(one.key for one in in_flight(self.passes))
        return now <= known

    def without_gradient(self, key: Signature, request: Request | None) -> frozenset[int]:
        """Outputs left on a module or in a hook that get no gradient from the loop, as far as known.

        Args:
            key: signature of the pass.
            request: the request of its present plan, if it has one.
        """
        return self.narrowed.get(key, frozenset[int]() if request is None else request.capture.without_gradient)

    def is_otherwise(self, key: Signature, planned: Planned | None) -> bool:
        """Whether the loop uses the outputs or runs the backward pass differently from the plan's assumptions."""
        if planned is None:
            return False
        request = planned.request
        if key in self.widened:
            narrowed, widened = False, request.capture.cut
        else:
            narrowed, widened = self.without_gradient(key, request) != request.capture.without_gradient, False
        apart = key in self.apart and bool(planned.capture.summed) and not request.capture.by_use
        return narrowed or widened or apart or ((key, True) in self.regions and not request.backward_in_autocast)

    def request(self, key: Signature, asked: Request, planned: Planned | None, *, decide: bool, **more: Any) -> Request:
        """Request for a pass: the one that was asked for, adapted to the observed behaviour of the loop.

        Args:
            key: signature of the pass.
            asked: the request for any pass.
            planned: its plan, if it has one.
            decide: whether branches on inputs are decided when it is captured.
            more: other fields of the request.
        """
        cut = key not in self.widened
        without = self.without_gradient(key, None if planned is None else planned.request)
        capture = replace(
            asked.capture,
            cut=cut,
            without_gradient=without if cut else frozenset[int](),
            by_use=key in self.apart,
            decide=decide,
        )
        return replace(
            asked,
            capture=capture,
            told=cut and key in self.narrowed,
            backward_in_autocast=asked.backward_in_autocast or (key, True) in self.regions,
            **more,
        )

    def _note(self, together: Counter[Signature], name: str) -> None:
        for key in together:
            others = together - Counter([key])
            known = self.beside.get(key, Counter())
            if not others <= known:
                self.beside[key] = known | others
                self.apart.add(key)
                log.warning(
                    "%s makes %d forward passes before a backward pass; this step may take more than the budget, the "
                    "next one is planned for as many",
                    name,
                    together.total(),
                )

    def plan(
        self, key: Signature, planned: Callable[[int], CompiledPlan], name: str, plans: Mapping[Signature, CompiledPlan]
    ) -> CompiledPlan:
        """A plan for one pass that leaves room for the other passes seen with it.

        Args:
            key: signature of the pass.
            planned: plans with the given number of bytes taken in addition to the step.
            name: of the module.
            plans: the present plans, by signature.

        Raises:
            BudgetError: if the pass does not fit with others, or `TogetherError` if several of its kind do not fit.
        """
        others = self.beside.get(key)
        if not others:
            return planned(0)
        self.planned_beside[key] = Counter(others)
        known = plans.get(key)
        beside_bytes = sum(held_bytes(plans[k]) * count for k, count in others.items() if k != key and k in plans)
        alike = others[key]
        if known is None or not alike:
            return planned(beside_bytes + (0 if known is None else _gradient_bytes(known)))
        beside_bytes += _gradient_bytes(known)
        return self._shared(known, planned, alike, beside_bytes, name)

    def _shared(
        self, known: CompiledPlan, planned: Callable[[int], CompiledPlan], alike: int, beside_bytes: int, name: str
    ) -> CompiledPlan:
        """The plan of one of several equal passes, with room for the bytes that the others hold by the same plan."""
        assert known.planned is not None
        graph = known.planned.graph
        passing = known.predicted.peak_bytes - graph.static_bytes - held_bytes(known)
        room = known.budget_bytes - graph.static_bytes - beside_bytes - passing
        most = alike * held_bytes(known)
        low, high, aside = 0, most, min(most, max(0, room * alike // (alike + 1)))
        found: CompiledPlan | None = None
        least: tuple[int, CompiledPlan] | None = None
        failure: BudgetError | None = None
        edge: int | None = None
        for _ in range(_MOST_TRIES):
            try:
                plan = planned(beside_bytes + aside)
            except BudgetError as error:
                failure = error if failure is None or error.least_bytes < failure.least_bytes else failure
                high = aside
                edge = aside - (error.least_bytes - known.budget_bytes)  # below zero where one pass does not fit
                if edge > low or least is None:
                    aside = edge
                    continue
            else:
                held = alike * held_bytes(plan)
                together = plan.predicted.peak_bytes - aside + held
                least = min(least or (together, plan), (together, plan), key=lambda one: one[0])
                if held <= aside:
                    found, high = plan, aside
                    if aside - held <= _CLOSE_ENOUGH * plan.budget_bytes:
                        break
                elif aside == edge:  # no plan of a pass holds less
                    break
                else:
                    low = aside
            if high - low <= 1:
                break
            aside = (low + high + 1) // 2
        if found is not None:
            log.info("%s: %s set aside for %d other passes", name, format_bytes(aside), alike)
            return found
        if least is None:
            least_bytes = known.budget_bytes + most if failure is None else failure.least_bytes
        else:
            least_bytes = max(least[0], known.budget_bytes + 1)
        raise TogetherError(
            f"{name} makes {alike + 1} forward passes before a backward pass, and what they hold together does not fit "
            f"{format_bytes(known.budget_bytes)}; call it once on all inputs put together, go back after each pass, or "
            f"give it about {format_bytes(least_bytes)}" + ("" if failure is None else f" (of one pass: {failure})"),
            budget_bytes=known.budget_bytes,
            least_bytes=least_bytes,
            plan=None if least is None else least[1],
        ) from failure


def _in_autocast_region() -> bool:
    """Whether an autocast region is open; one that is switched off keeps the casts of the regions in it, too."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1 and torch.is_autocast_cache_enabled()


def held_bytes(plan: CompiledPlan) -> int:
    """Bytes that a planned pass holds between its forward and its backward pass: inputs, results and its loss included.

    Whether the loop computes a loss for each pass, or one for all, is not known; the former takes more.
    """
    assert plan.planned is not None
    graph, capture = plan.planned.graph, plan.planned.capture
    made_bytes = simulate(graph, plan.program).forward_end_bytes - graph.static_bytes
    saved_bytes = 0 if capture.loss is None else capture.loss.saved_bytes
    return max(0, made_bytes) + bytes_of(graph.residents, ResidentKind.INPUT, ResidentKind.PLAIN_CODE) + saved_bytes


def _gradient_bytes(plan: CompiledPlan) -> int:
    """Bytes of the gradients of another pass that exist already when this pass runs backward."""
    assert plan.planned is not None
    return plan.planned.graph.gradient_bytes
