"""A plan for inputs of another size, from the plans of sizes that were planned before.

Texts of 20 lengths are 20 steps with the same ops. A search, measurements and a proof for each of them would take
longer than the training. So a new size takes over the decisions of a known plan: the same ops are saved and recomputed,
in the same order. The simulator tells whether that fits, variants and buffer reuse are selected anew. The fastest of
the known orders that fits is used.

Idea: ours; compilers with symbolic shapes reuse kernels in this way, not plans.

Known limits: a short search without measurements is made where no known order fits, or the step runs other ops. Steps
in tiles, of sharded modules and of other strategies than `auto` are planned from the start. Such a plan is not proved
by a run of its own: its ops and its way to run them are those of a plan that was, and its first steps are watched.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.dynamo.symbolic_call import SymbolicCall
from memfit.capture.state.input_signature import Signature, is_same_call, signature
from memfit.capture.training_step import Capture, beside_gradients, device_of
from memfit.compiler.capture_for_sizes import SymbolicCalls, captured_for_sizes, is_for_sizes, varied_since
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Request
from memfit.compiler.stages import captured_for, planned_step, resolve_budget, tiers_of
from memfit.errors import BudgetError, ProgramError
from memfit.ir.graph import StepGraph
from memfit.ir.instructions import computes_in
from memfit.ir.program import Program, baseline_order
from memfit.ir.residents import ResidentKind
from memfit.planner.finalize.variant_selection import program_within
from memfit.planner.offload.search import find_program
from memfit.profiling.cost_cache import CostCache, open_cache
from memfit.profiling.scaled_costs import ScaledCosts, same_ops, scaled_costs
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check

__all__ = ["KnownSizes", "carried_plan"]

log = logging.getLogger(__name__)

_SEARCH_SECONDS = 0.5
"""Nominal seconds of the search where no known order fits."""

_MOST_ORDERS = 3
"""Number of known plans, of the nearest sizes, whose orders are tried."""

_MOST_MEASURED = 2
"""How often ops are measured because a program runs them in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSizes:
    """What is known of a module's steps for other sizes.

    Attributes:
        plans: plans for these sizes, the nearest first.
        calls: calls of the module for many sizes, to which calls are added.
    """

    plans: Sequence[CompiledPlan] = ()
    calls: SymbolicCalls = field(default_factory=SymbolicCalls)

    @property
    def signature(self) -> Signature:
        """The signature of the nearest size; empty if none is known."""
        planned = self.plans[0].planned if self.plans else None
        return () if planned is None else planned.signature


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """While active, Python looks for no reference cycles: with all of torch loaded, one such search takes 0.4 s."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_no_collections()
def carried_plan(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request, known: KnownSizes
) -> tuple[CompiledPlan, SymbolicCall | None] | None:
    """A plan for a call, with the decisions of plans for calls of other sizes.

    Args:
        model: the module.
        args: positional inputs.
        kwargs: keyword inputs.
        request: budget and other requirements.
        known: what is known of other sizes.

    Returns:
        The plan, and the call for many sizes that it is the first plan of, if it is, so that it is to be proved; None
        if the step is to be planned from the start.
    """
    usable = [plan for plan in known.plans if plan.planned is not None and not plan.is_tiled]
    if not usable or not is_for_sizes(model, request):
        return None
    device = device_of(model)
    cache = open_cache(device)
    capture, first_of = _captured(model, args, kwargs, request, usable, known.calls, cache)
    costs = _costs(usable, capture, device, cache)
    if costs is None:
        log.info("no known step was measured")
        return None
    orders = [plan.program for plan in usable[:_MOST_ORDERS] if _runs_same_ops(plan, capture)]
    budget_bytes = resolve_budget(request.budget, device, capture.graph.static_bytes)
    limit_bytes = int(budget_bytes / max(1.0, *(_missed(plan) for plan in usable)))
    for _ in range(_MOST_MEASURED + 1):
        graph = tiers_of(costs.graph(), request, device)
        program = _program(graph, orders, limit_bytes)
        if program is None:
            log.info("no known order fits, nor one that a short search finds")
            return None
        if not costs.measure(_to_measure(graph, program)):
            step = replace(capture, graph=graph), graph
            plan = planned_step(model, args, kwargs, step, request, budget_bytes, program)
            assert plan.planned is not None
            return replace(plan, planned=replace(plan.planned, is_measured=False)), first_of
    log.info("ops of the chosen programs do not have the same bits in chunks")
    return None


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    usable: Sequence[CompiledPlan],
    calls: SymbolicCalls,
    cache: CostCache,
) -> tuple[Capture, SymbolicCall | None]:
    """The captured step, and the call for many sizes that it is the first step of, if it is."""
    same = _captured_before(model, args, kwargs, request, usable)
    if same is not None:
        return same, None
    nearest = usable[0].planned
    assert nearest is not None
    optimizer = nearest.capture.optimizer if nearest.request.optimizer is request.optimizer else None
    captured = functools.partial(captured_for, model, args, kwargs, request, cache, optimizer=optimizer)
    if any(plan.planned.capture.subgraphs.breaks for plan in usable if plan.planned is not None):
        return captured(), None
    signatures = [plan.planned.signature for plan in usable if plan.planned is not None]
    found = captured_for_sizes(
        *(model, args, kwargs, calls, request),
        varying=lambda now, leaves: varied_since(now, leaves, signatures, calls.made),
        captured=lambda call: captured(symbolic=call),
    )
    return found or (captured(), None)


def _captured_before(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], request: Request, usable: Sequence[CompiledPlan]
) -> Capture | None:
    """The capture of a step that differs in nothing but the gradients that exist before it."""
    now = signature(model, args, kwargs)
    for plan in usable:
        assert plan.planned is not None
        capture, asked = plan.planned.capture, plan.planned.request
        alike = (asked.capture, asked.loss_fn, asked.optimizer) == (request.capture, request.loss_fn, request.optimizer)
        one_graph = not capture.subgraphs.breaks and capture.subgraphs.call is not None
        if alike and one_graph and request.capture.accumulate is None and is_same_call(now, plan.planned.signature):
            found = beside_gradients(capture, model)
            graph = found.graph.beside("beside the step", request.beside_bytes, ResidentKind.OTHER)
            return replace(found, graph=graph, residents=graph.residents)
    return None


def _costs(
    usable: Sequence[CompiledPlan], capture: Capture, device: torch.device, cache: CostCache
) -> ScaledCosts | None:
    """The costs of a step, scaled from those of a step that was measured, of the same ops if there is one."""
    measured = [plan for plan in usable if plan.planned is not None and plan.planned.is_measured]
    for plan in sorted(measured, key=lambda one: not _runs_same_ops(one, capture)):
        assert plan.planned is not None
        found = scaled_costs(capture, plan.planned.capture, plan.planned.graph, device, cache)
        if found is not None:
            return found
    return None


def _runs_same_ops(plan: CompiledPlan, capture: Capture) -> bool:
    return plan.planned is not None and same_ops(capture.joint_ops, plan.planned.capture.joint_ops)


def _missed(plan: CompiledPlan) -> float:
    """The factor by which a plan took more than predicted when it was proved."""
    return (plan.measured_peak_bytes or 0) / plan.predicted.peak_bytes


def _program(graph: StepGraph, known: Sequence[Program], limit_bytes: int) -> Program | None:
    """The fastest program that fits, of those with known decisions, or of a short search; None if there is none."""
    everything = program_within(graph, baseline_order(graph), limit_bytes)
    if simulate(graph, everything).peak_bytes <= limit_bytes:
        return everything  # nothing is recomputed
    fitting: list[tuple[float, Program]] = []
    for program in _with_known_decisions(graph, known, limit_bytes):
        timeline = simulate(graph, program)
        if timeline.peak_bytes <= limit_bytes:
            fitting.append((timeline.step_seconds, program))
    if fitting:
        return min(fitting, key=lambda one: one[0])[1]
    try:
        return find_program(graph, limit_bytes, seconds=_SEARCH_SECONDS).program
    except BudgetError:
        return None


def _with_known_decisions(graph: StepGraph, known: Sequence[Program], limit_bytes: int) -> Iterator[Program]:
    orders: list[list[int]] = []
    for program in known:
        if program.swapped() or program.tier_resident():
            try:
                check(graph, program)
            except ProgramError as error:
                log.debug("a program with swaps cannot be taken over: %s", error)
            else:
                yield program
        elif program.order() not in orders:
            orders.append(program.order())
    for order in orders:
        yield program_within(graph, order, limit_bytes)


def _to_measure(graph: StepGraph, program: Program) -> set[int]:
    """Ops that run in a way whose bits depend on the size: in chunks, in slices, or recomputed by another call."""
    found: set[int] = set()
    seen: set[int] = set()
    for compute in computes_in(program.instructions):
        again = compute.op in seen and graph.ops[compute.op].recompute_as is not None
        if compute.chunks > 1 or compute.sliced or again:
            found.add(compute.op)
        seen.add(compute.op)
    return found
