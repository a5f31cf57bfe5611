"""Recomputation and swaps together: links swap results while compute runs, the other results are recomputed.

First the relaxation that knows links (`memfit.planner.bounds.relaxation`) chooses the results that may be swapped:
those that fit through the links in time and save the most recomputation. Then the search of
`memfit.planner.search.portfolio` plans the step in which transfers back stand for recomputations of these results
(`memfit.planner.offload.model`). Each order that it tries is turned into transfers and judged with them
(`memfit.planner.offload.transfer_schedule`). The relaxation does not see that memory is short while storages come back,
so there are several rounds: storages for which compute waited stay in memory in the next round, and links are counted
at a part of their rate. Rounds go on as long as the whole search takes no more than twice the time of the search
without swaps. The search without swaps is left out only if the bound says that its plan cannot be faster, so tiers
never make a plan slower.

Idea: POFO (Beaumont et al., NeurIPS 2021), which removes about a third of the overhead of recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program
from memfit.ir.tiers import Tier
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.planner.bounds.relaxation import select_saved
from memfit.planner.budget_limit import fitting
from memfit.planner.effort import Effort, search_limit
from memfit.planner.finalize.variant_selection import leanest, program_within
from memfit.planner.offload.model import placed_on_tiers, swappable, swapping_step
from memfit.planner.offload.streaming_search import find_streaming
from memfit.planner.offload.transfer_schedule import ahead_of_use, with_transfers
from memfit.planner.search.min_memory import LAST_RESORT, LastResort
from memfit.planner.search.portfolio import CLOSE, Found, Moves, Progress, find_order
from memfit.sim.simulator import Timeline, simulate

__all__ = ["find_program"]

_LINK_SHARES = (1.0, 0.85, 0.7)
"""The share of the rate of links that each round assumes when it chooses storages."""

_SPILLED = 0.96
"""Share of the budget to which orders are spilled, so that room is left for storages that come back early."""


def find_program(
    graph: StepGraph,
    budget_bytes: int,
    *,
    seconds: float = 8.0,
    progress: Progress | None = None,
    last_resort: LastResort = LAST_RESORT,
    any_speed: bool = False,
    effort: Effort | None = None,
) -> Found:
    """Finds a fast program within a budget, with swaps where the step has tiers.

    Args:
        graph: the step, with times and links.
        budget_bytes: peak of the step.
        seconds: work of the search without swaps in nominal seconds, see `find_order`; with tiers the whole search
            takes up to twice as much.
        progress: called with a line of text for each attempt.
        last_resort: see `find_order`; for a step without tiers.
        any_speed: whether any program that fits is good enough.
        effort: counts the work.

    Returns:
        The fastest program found; its bound is for plans that may swap if the step has tiers.

    Raises:
        BudgetError: if no program fits, with the least budget that works.
    """
    found = _search(
        *(graph, budget_bytes),
        seconds=search_limit(seconds),
        progress=progress,
        last_resort=last_resort,
        any_speed=any_speed,
        effort=Effort(effort),
    )
    return replace(found, timeline=fitting(graph, found.program, budget_bytes))


def _search(
    graph: StepGraph,
    budget_bytes: int,
    *,
    seconds: float,
    progress: Progress | None,
    last_resort: LastResort,
    any_speed: bool,
    effort: Effort,
) -> Found:
    """The search of `find_program`; its result is not judged yet."""
    if graph.is_tiled and graph.tiers:
        return find_streaming(
            *(graph, budget_bytes), seconds=seconds, progress=progress, any_speed=any_speed, effort=effort
        )
    alone = structs.replace(graph, tiers=())
    if not graph.tiers:
        return find_order(
            *(alone, budget_bytes),
            seconds=seconds,
            progress=progress,
            last_resort=last_resort,
            any_speed=any_speed,
            effort=effort,
        )
    bound = 0.0 if any_speed else relaxed_bound(alone, budget_bytes, seconds=seconds / 8, effort=effort)
    found: list[Found] = []
    errors: list[BudgetError] = []
    without_seconds: float | None = None  # work of the search without swaps

    def fastest() -> float:
        return min((one.timeline.step_seconds for one in found), default=float("inf"))

    def search_without() -> None:
        nonlocal without_seconds
        begin = effort.seconds
        try:
            one = find_order(
                *(alone, budget_bytes), seconds=seconds, progress=progress, any_speed=any_speed, effort=effort
            )
            found.append(one)
        except BudgetError as error:
            errors.append(error)
        without_seconds = effort.seconds - begin

    if bound < CLOSE * graph.seconds:
        search_without()
    near = graph.seconds + max(0.0, bound) + CLOSE * graph.seconds
    rounds = () if any_speed or fastest() < near else _rounds(graph, budget_bytes, seconds, progress, effort)
    begin = effort.seconds
    for number, one in enumerate(rounds, 1):
        round_seconds = (effort.seconds - begin) / number
        found += [] if one is None else [one]
        if without_seconds is None and fastest() > graph.seconds + bound:
            search_without()
            begin += without_seconds or 0.0
        if (number + 1) * round_seconds > (without_seconds or seconds):
            break
    if without_seconds is None and (not found or fastest() > graph.seconds + bound):
        search_without()
    if not found:
        everything = placed_on_tiers(graph, swappable(graph))
        try:
            found.append(_with(graph, everything, budget_bytes, seconds, progress, effort, any_speed=any_speed))
        except BudgetError as error:
            raise min([*errors, error], key=lambda e: e.least_bytes) from None
    best = min(found, key=lambda one: one.timeline.step_seconds)
    if any_speed:
        return best
    return replace(best, bound_seconds=relaxed_bound(graph, budget_bytes, seconds=seconds / 8, effort=effort))


def _rounds(
    graph: StepGraph, budget_bytes: int, seconds: float, progress: Progress | None, effort: Effort
) -> Iterator[Found | None]:
    """Plans that may swap the storages that each round chooses; None for a choice with which no plan fits.

    A storage is not swapped in later rounds if a plan waits for it longer than its recomputation takes.
    """
    outputs = sum(graph.storages[s].nbytes for s in set(graph.outputs) if not graph.is_free(s))
    room = budget_bytes - graph.static_bytes - outputs - graph.buffer_bytes([links.tier for links in graph.tiers])
    producer = graph.producers()
    seen: list[Mapping[int, Tier]] = [{}]
    staying: set[int] = set()
    for share in _LINK_SHARES:
        chosen = select_saved(
            *(graph, room), seconds=seconds / 8, gap=1e-2, link_share=share, staying=staying, effort=effort
        )
        if chosen is None or chosen.swapped in seen:
            continue
        seen.append(chosen.swapped)
        try:
            found = _with(graph, chosen.swapped, budget_bytes, seconds / 8, progress, effort)
        except BudgetError:
            # The choice depends on the budget, so the least budget of this choice need not work when it is requested.
            yield None
            continue
        yield found
        waited = found.timeline.stalls.items()
        staying |= {s for s, stall in waited if stall > graph.ops[producer[s]].later.seconds}


def _with(
    graph: StepGraph,
    swapped: Mapping[int, Tier],
    budget_bytes: int,
    seconds: float,
    progress: Progress | None,
    effort: Effort,
    *,
    any_speed: bool = False,
) -> Found:
    """The fastest program found in which the given storages may be swapped.

    Raises:
        BudgetError: if no program fits.
    """
    swapping = swapping_step(graph, swapped)
    lean = leanest(swapping)
    links = {links.tier: links.into for links in graph.tiers}
    into = {storage: links[tier] for storage, tier in swapped.items()}

    def ahead(order: Sequence[int]) -> list[int]:
        return ahead_of_use(lean, order, into, budget_bytes)

    def finish(order: Sequence[int]) -> tuple[Program, Timeline]:
        program = program_within(swapping, ahead(order), budget_bytes)
        moved = with_transfers(graph, swapping, program, swapped, budget_bytes)
        return moved, simulate(graph, moved)

    moves = Moves(ahead=ahead, finish=finish, spill_bytes=int(budget_bytes * _SPILLED))
    return find_order(
        *(swapping, budget_bytes), seconds=seconds, progress=progress, moves=moves, any_speed=any_speed, effort=effort
    )
