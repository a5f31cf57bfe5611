"""The phases from a module and a budget to a plan: capture and profile, then plan and check.

`memfit.compiler.driver` puts the phases together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import nn

from memfit import strategies
from memfit.capture.checkpoints import CHECKPOINTING
from memfit.capture.distributed.fsdp import is_sharded
from memfit.capture.dynamo.symbolic_call import SymbolicCall
from memfit.capture.optimizer.state import OptimizerCost, OptimizerPart, optimizer_cost
from memfit.capture.optimizer.unwrapped import check_optimizer
from memfit.capture.state.input_signature import signature
from memfit.capture.training_step import Capture, capture_step, check_step, device_of, read_again
from memfit.compiler.capture_for_sizes import SymbolicCalls, captured_for_sizes, guessed_to_vary
from memfit.compiler.consensus import agreed_program, agreed_start, agreed_step
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Planned, Progress, Request
from memfit.device_memory import free_bytes, total_bytes
from memfit.errors import SpecError
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program
from memfit.ir.residents import ResidentKind
from memfit.ir.serialization import graph_digest
from memfit.planner.analysis.explain import decisions, prediction
from memfit.planner.analysis.no_plan import no_plan
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.planner.budget_limit import fitting
from memfit.planner.effort import Effort, search_limit
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.offload.search import find_program
from memfit.planner.search.min_memory import least_budget, least_order
from memfit.profiling.cost_cache import CostCache, machine_name, open_cache
from memfit.profiling.profiler import known_separable, profile_ops, separated
from memfit.runtime.offload.tiers import parse_tiers, tier_links
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from memfit.torch_compat.core import pytree
from memfit.units import format_bytes, parse_bytes

__all__ = [
    "Step",
    "capture_and_profile",
    "captured_for",
    "check_request",
    "fingerprint",
    "plan_captured",
    "planned_step",
    "resolve_budget",
    "tiers_of",
]


Step = tuple[Capture, StepGraph]
"""A captured step and its profiled graph."""

_MOST_SEARCHES = 4
"""The most that a search takes, as a multiple of its nominal seconds."""

_BITWISE = ("keep", "recompute", "swap")
_ALL = (*_BITWISE, "tile")


def resolve_budget(budget: int | str, device: torch.device, static_bytes: int = 0) -> int:
    """Bytes of a budget.

    Args:
        budget: bytes, `"8GiB"`, `"60%"`, or `"auto"`.
        device: device to whose memory percentages and `auto` refer.
        static_bytes: bytes of the step that are in memory already, and so not free but within the budget.

    Raises:
        SpecError: if the budget cannot be parsed, or exceeds the memory of the device.
    """
    if budget == "auto":
        return free_bytes(device) + static_bytes
    whole = total_bytes(device)
    nbytes = parse_bytes(budget, whole_bytes=whole)
    if nbytes > whole:
        raise SpecError(
            f"the budget {format_bytes(nbytes)} exceeds the {format_bytes(whole)} of {device}; "
            "'auto' is what is free of it"
        )
    return nbytes


def capture_and_profile(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    *,
    grid: tuple[int, ...] = (),
    before: Capture | None = None,
    calls: SymbolicCalls | None = None,
    cache: CostCache | None = None,
    progress: Progress | None = None,
) -> tuple[Capture, StepGraph]:
    """The captured step, and its graph with measured times.

    Args:
        model: module in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        request: budget and other requirements.
        grid: grid of tiles of the step, for the lever `tile`; empty for no tiles.
        before: a capture for the same request, perhaps in other tiles; its trace is reused.
        calls: calls of the module for many sizes, for a capture that serves other sizes too if it can.
        cache: known costs; by default those of this machine.
        progress: called with the progress.
    """
    device = device_of(model)
    if progress is not None:
        progress("capture", 0, 1)
    cache = open_cache(device) if cache is None else cache
    # All processes of a sharded module must make the same plan, whatever bits each of them measures.
    separate = _never if is_sharded(model) else known_separable(cache)
    captured = functools.partial(_captured, model, args, kwargs, request, separate=separate, grid=grid)
    if before is not None:
        capture = read_again(before, separate=separate, grid=grid, device_type=device.type)
    elif calls is None:
        capture = captured()
    else:
        found = captured_for_sizes(
            *(model, args, kwargs, calls, request),
            varying=lambda _, leaves: {} if calls.made else guessed_to_vary(leaves),
            captured=lambda call: captured(symbolic=call),
        )
        capture = captured() if found is None else found[0]
    if not is_sharded(model):
        capture = separated(capture, device, cache)
    if progress is not None:
        progress("capture", 1, 1)

    def profiling(done: int, total: int) -> None:
        if progress is not None:
            progress("profile", done, total)

    graph = profile_ops(capture, device, cache, progress=profiling)
    graph = agreed_step(model, tiers_of(graph, request, device), device)
    return replace(capture, graph=graph), graph


def captured_for(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    cache: CostCache,
    *,
    symbolic: SymbolicCall | None = None,
    optimizer: OptimizerCost | None = None,
) -> Capture:
    """The captured step, whose ops are not measured.

    Args:
        model: module in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        request: budget and other requirements.
        cache: known costs.
        symbolic: the call of the module for many sizes, from which the step is made; None to capture it anew.
        optimizer: the memory of the optimizer, if known.

    Raises:
        NotOfSizesError: if the call for many sizes does not serve these inputs.
    """
    captured = _captured(
        *(model, args, kwargs, request),
        separate=known_separable(cache),
        grid=(),
        optimizer=optimizer,
        symbolic=symbolic,
    )
    return separated(captured, device_of(model), cache)


def _never(_: str) -> bool:
    return False


def _captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    request: Request,
    *,
    separate: Callable[[str], bool],
    grid: tuple[int, ...],
    optimizer: OptimizerCost | None = None,
    symbolic: SymbolicCall | None = None,
) -> Capture:
    """The step captured for a request; its static bytes include `Request.beside_bytes`."""
    agreed_start(model, lambda: check_step(model, args, kwargs, checkpointing=request.capture.checkpointing))
    capture = capture_step(
        *(model, args, kwargs),
        loss_fn=request.loss_fn,
        optimizer=optimizer or optimizer_cost(request.optimizer, device_of(model).type),
        label=request.label,
        options=replace(request.capture, separate=separate, grid=grid, symbolic=symbolic),
    )
    graph = capture.graph.beside("beside the step", request.beside_bytes, ResidentKind.OTHER)
    return replace(capture, graph=graph, residents=graph.residents)


def tiers_of(graph: StepGraph, request: Request, device: torch.device) -> StepGraph:
    """The step with the tiers that a plan may swap to; none if the request or its strategy does not swap."""
    may = request.levers in ("bitwise", "all") or "swap" in request.levers
    tiers = tier_links(request.tiers, device) if may and strategies.swaps(request.strategy) else ()
    return structs.replace(graph, tiers=tiers)


def plan_captured(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    capture: Capture,
    graph: StepGraph,
    request: Request,
    budget_bytes: int,
    *,
    progress: Progress | None = None,
) -> CompiledPlan:
    """Plans a profiled step without running it."""
    most, effort = _MOST_SEARCHES * search_limit(request.search_seconds), Effort()

    def searching(attempt: str) -> None:
        if progress is not None:
            done = min(1.0, effort.seconds / most) if most else 0.0
            progress(f"plan ({attempt})" if attempt else "plan", int(100 * done), 100)

    searching("")
    program, bound_seconds = agreed_program(
        model, lambda: _program(graph, request, budget_bytes, searching, effort), device_of(model)
    )
    plan = planned_step(model, args, kwargs, (capture, graph), request, budget_bytes, program, bound_seconds)
    if progress is not None:
        progress("plan", 1, 1)
    return plan


def planned_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    step: Step,
    request: Request,
    budget_bytes: int,
    program: Program,
    bound_seconds: float | None = None,
) -> CompiledPlan:
    """The plan of a step that runs a program.

    Raises:
        ProgramError: if the program does not compute the step.
    """
    capture, graph = step
    check(graph, program)
    timeline = simulate(graph, program)
    return CompiledPlan(
        label=request.label or type(model).__name__,
        budget_bytes=budget_bytes,
        strategy=request.strategy,
        predicted=prediction(graph, timeline, bound_seconds=bound_seconds),
        program=program,
        decisions=decisions(graph, program, timeline),
        fingerprint=fingerprint(model, args, kwargs),
        graph_digest=graph_digest(graph),
        grid=capture.grid,
        checkpointing=request.capture.checkpointing,
        planned=Planned(capture=capture, graph=graph, request=request, signature=signature(model, args, kwargs)),
    )


def _program(
    graph: StepGraph, request: Request, budget_bytes: int, progress: Callable[[str], None], effort: Effort
) -> tuple[Program, float]:
    strategy = request.strategy
    if strategy == "auto":
        found = find_program(
            *(graph, budget_bytes),
            seconds=request.search_seconds,
            progress=progress,
            any_speed=request.any_speed,
            effort=effort,
        )
        return found.program, found.bound_seconds
    program = strategies.program(strategy, graph, budget_bytes)
    timeline = simulate(graph, program)
    if timeline.peak_bytes > budget_bytes:
        lean = leanest(graph)
        least = least_budget(lean, least_order(lean, seconds=request.search_seconds))
        raise no_plan(
            *(graph, program, budget_bytes),
            subject=f"program of strategy {strategy!r}",
            advice=f"strategy 'auto' fits from {format_bytes(least)} ({least} bytes) on",
        )
    fitting(graph, program, budget_bytes)
    return program, relaxed_bound(graph, timeline.peak_bytes, seconds=search_limit(2.0))


def fingerprint(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, str | int | list[Any]]:
    """Properties that a plan depends on, as text that can be compared."""
    tensors = [t for t in pytree.tree_leaves((list(args), kwargs)) if isinstance(t, torch.Tensor)]
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()],
        "inputs": [f"{tuple(t.shape)} {t.dtype}" for t in tensors],
        "torch": str(torch.__version__),
        "device": machine_name(device_of(model)),
    }


def check_request(request: Request, device: torch.device) -> None:
    """Refuses an invalid request.

    Raises:
        SpecError: if it is invalid; the message lists the valid values.
    """
    levers = {"bitwise": _BITWISE, "all": _ALL}.get(str(request.levers), request.levers)
    if isinstance(levers, str) or not set(levers) <= set(_ALL):
        raise SpecError(f"unknown levers; there are 'bitwise', 'all' and {_ALL} (levers: {request.levers!r})")
    if request.exact not in ("bitwise", "rounding"):
        raise SpecError(f"exact must be 'bitwise' or 'rounding' (exact: {request.exact!r})")
    if not isinstance(request.optimizer, OptimizerPart):
        check_optimizer(request.optimizer)
    if request.capture.checkpointing not in CHECKPOINTING:
        raise SpecError(f"unknown checkpointing {request.capture.checkpointing!r}; there are {CHECKPOINTING}")
    strategies.check_name(request.strategy)
    parse_tiers(request.tiers, device)
