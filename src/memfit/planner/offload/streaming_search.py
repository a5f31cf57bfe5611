"""Tiled steps with tiers: chooses tier-resident storages, so that only slices of these are in memory.

First every storage that can live on a tier does so (`memfit.ir.streaming`). The search of
`memfit.planner.search.portfolio` finds an order of this step as of any other; its least memory is that of slices. Then,
one after the other, storages move back to memory where there is room for them; storages for which compute waits longest
come first. The plan without tiers is searched for as well, so tiers never make a plan slower.

Known limits: an order is searched for with every such storage on tiers or with none; the storages that stay on tiers
are chosen afterwards, with the order as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.instructions import TierResident
from memfit.ir.program import Program
from memfit.ir.streaming import streamable, streaming_step
from memfit.ir.tiers import Tier
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.planner.effort import Effort
from memfit.planner.finalize.variant_selection import leanest, program_within
from memfit.planner.offload.model import placed_on_tiers
from memfit.planner.search.min_memory import least_budget, least_order
from memfit.planner.search.portfolio import CLOSE, PROGRAM_WORK, Found, Progress, find_order
from memfit.sim.simulator import Timeline, simulate

__all__ = ["find_streaming", "least_streaming"]


def find_streaming(
    graph: StepGraph,
    budget_bytes: int,
    *,
    seconds: float = 8.0,
    progress: Progress | None = None,
    any_speed: bool = False,
    effort: Effort | None = None,
) -> Found:
    """Finds a fast program of a tiled step within a budget, with storages on tiers where that helps.

    Args:
        graph: a tiled step, with times and links.
        budget_bytes: peak of the step.
        seconds: work of each of two searches in nominal seconds, see `find_order`.
        progress: called with a line of text for each attempt.
        any_speed: whether any program that fits is good enough.
        effort: counts the work.

    Returns:
        The fastest program found; its bound is for plans that may place any storage on tiers.

    Raises:
        BudgetError: if no program fits, with the least budget that works.
    """
    effort = effort or Effort()
    found: list[Found] = []
    errors: list[BudgetError] = []
    alone = structs.replace(graph, tiers=())
    placed = _everything(graph)
    away = {s: structs.replace(storage, nbytes=0) for s, storage in enumerate(graph.storages) if s in placed}
    elsewhere = structs.replace(alone, storages=tuple(away.get(s, x) for s, x in enumerate(graph.storages)))
    bound = 0.0 if any_speed else relaxed_bound(elsewhere, budget_bytes, seconds=seconds / 8, effort=effort)
    try:
        one = find_order(*(alone, budget_bytes), seconds=seconds, progress=progress, any_speed=any_speed, effort=effort)
        found.append(one)
    except BudgetError as error:
        errors.append(error)
    if any_speed and found:
        return found[0]
    near = graph.seconds + bound + CLOSE * graph.seconds
    if placed and all(one.timeline.step_seconds > near for one in found):
        try:
            moving = streaming_step(graph, placed)
            moved = find_order(
                *(moving, budget_bytes), seconds=seconds, progress=progress, any_speed=any_speed, effort=effort
            )
            found.append(_with_room(graph, moved, placed, budget_bytes, seconds, effort))
        except BudgetError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: error.least_bytes)
    return replace(min(found, key=lambda one: one.timeline.step_seconds), bound_seconds=bound)


def least_streaming(graph: StepGraph, *, seconds: float = 8.0) -> int:
    """The least budget of a tiled step, with every storage on tiers that can be there if that takes less.

    Args:
        graph: a tiled step.
        seconds: work of each of two searches in nominal seconds, see `least_order`.
    """
    steps = [graph, streaming_step(graph, _everything(graph))] if graph.tiers else [graph]
    return min(least_budget(lean, least_order(lean, seconds=seconds)) for lean in map(leanest, steps))


def _everything(graph: StepGraph) -> dict[int, Tier]:
    """All storages that can live on a tier and have room there, the largest first."""
    able = sorted(streamable(graph), key=lambda s: -graph.storages[s].nbytes)
    return placed_on_tiers(graph, able, in_slices=True)


def _with_room(
    graph: StepGraph, moved: Found, placed: Mapping[int, Tier], budget_bytes: int, seconds: float, effort: Effort
) -> Found:
    """The same order with storages in memory for which there is room; searches for about `seconds`."""
    own = Effort(effort)
    away = dict(placed)
    best = _program(graph, moved.order, away, budget_bytes)
    for group in _halves(_by_stall(graph, best[1], away)):
        if own.exceeds(seconds):
            break
        own.charge_ops(PROGRAM_WORK * len(moved.order))
        if not away.keys() >= set(group):
            continue
        fewer = {s: tier for s, tier in away.items() if s not in group}
        tried = _program(graph, moved.order, fewer, budget_bytes)
        if tried[1].peak_bytes <= budget_bytes and tried[1].step_seconds <= best[1].step_seconds:
            best, away = tried, fewer
    program, timeline = best
    return Found(order=moved.order, program=program, timeline=timeline, bound_seconds=moved.bound_seconds)


def _program(
    graph: StepGraph, order: Sequence[int], placed: Mapping[int, Tier], budget_bytes: int
) -> tuple[Program, Timeline]:
    """The program of an order in which some storages live on tiers, and its simulated timeline."""
    within = program_within(streaming_step(graph, placed), order, budget_bytes)
    named = tuple(TierResident(storage, tier) for storage, tier in sorted(placed.items()))
    program = Program(instructions=(*named, *within.instructions))
    return program, simulate(graph, program)


def _by_stall(graph: StepGraph, timeline: Timeline, placed: Mapping[int, Tier]) -> list[int]:
    """Storages, sorted by the time that compute waits for each byte of them, the longest first."""
    return sorted(placed, key=lambda s: -timeline.stalls.get(s, 0.0) / max(1, graph.storages[s].nbytes))


def _halves(storages: Sequence[int]) -> Iterator[Sequence[int]]:
    """All storages, then each half of them, and so on down to single storages."""
    waiting = [storages]
    while waiting:
        group = waiting.pop(0)
        yield group
        if len(group) > 1:
            waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
