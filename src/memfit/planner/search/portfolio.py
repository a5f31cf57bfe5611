"""The planner behind `strategy="auto"`: several searches, judged by one simulator.

1. If the step fits with in-place ops and early frees alone, nothing is recomputed.
2. Select the saved storages with an integer program over time (`memfit.planner.search.cutting_planes`), for several
   numbers of checkpoints.
3. Start from rotor schedules of the chain of blocks, for the budget and for more, and from tighter and tighter
   relaxations.
4. Select over several epochs, which takes longer and reaches lower peaks.
5. Polish each order against the simulator (`memfit.planner.search.spill_and_fill`).
6. Vary the fastest orders (`memfit.planner.search.iterated_local_search`), and stop as soon as one is near the relaxed
   bound or time is up.

The search runs every op in its leanest variant (`memfit.planner.finalize.variant_selection`). The result also states
the relaxed bound, so a reader sees how much better planning could still gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.program import Program, baseline_order, program_of
from memfit.planner.analysis.no_plan import no_plan
from memfit.planner.bounds.lower_bound import LARGE_STEP, relaxed_bound, widest_op_bytes
from memfit.planner.bounds.relaxation import select_saved
from memfit.planner.effort import Effort
from memfit.planner.finalize.variant_selection import leanest, program_within, quicker
from memfit.planner.search import rotor
from memfit.planner.search.checkpoints import checkpoints
from memfit.planner.search.cutting_planes import select_over_time
from memfit.planner.search.iterated_local_search import Pool, varied
from memfit.planner.search.lazy_recompute import lazy_order, tiled_order
from memfit.planner.search.min_memory import LAST_RESORT, LastResort, least_budget, least_order
from memfit.planner.search.spill_and_fill import fill, spill
from memfit.sim.simulator import Timeline, simulate

__all__ = ["CLOSE", "PROGRAM_WORK", "Found", "Moves", "Progress", "auto_order", "find_order"]

CLOSE = 0.01
"""The search stops when the extra time exceeds the bound by less than this share of the step time."""

_FAR = 0.025
"""The search gets more time while the extra time is further from the bound than this share."""

_VERY_FAR = 0.1
"""The same for a large step, where one start takes seconds: nearer than this, more time has not paid off."""

_ON_BOUND = 0.25
"""Time limit of each solve for the bound, as a share of the time of the search."""

_ON_STARTS = 0.6
"""Share of the time that is spent on starts; the rest is spent on varying the best orders."""

_IN_VAIN = 50
"""Varying stops after this number of orders in a row that are no faster."""

PROGRAM_WORK = 6
"""Work to choose the variants of an order and to judge it, in multiples of the simulation of the order."""

_MORE_MEMORY = (1.02, 1.04, 1.07, 1.1, 1.15, 1.3)
"""Shares of the budget that a start may take: near the widest op, spilling a larger order often beats a tight one."""

_IN_SLICES = ((4, 2.0), (2, 1.5), (4, 1.3), (2, 1.15), (1, 1.5), (6, 1.5))
"""For a tiled step: pairs of a number of segments and the share of the budget for which the order is filled."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A program that fits.

    Attributes:
        order: the order of its ops, as the search knows it.
        program: the program that runs.
        timeline: its timeline from the simulator.
        bound_seconds: the least extra seconds any plan can have.
    """

    order: tuple[int, ...]
    program: Program
    timeline: Timeline
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Functions and target peak of a search that swaps; see `memfit.planner.offload.search`.

    Attributes:
        ahead: moves the swap in of each storage ahead of its use, in an order.
        finish: makes a program of an order and simulates it.
        spill_bytes: peak to which orders are spilled, so that room is left for storages that are swapped in early.
    """

    ahead: Callable[[Sequence[int]], list[int]]
    finish: Callable[[Sequence[int]], tuple[Program, Timeline]]
    spill_bytes: int


def auto_order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """The order of `find_order`, with the signature all strategies share."""
    if budget_bytes is None:
        return baseline_order(graph)
    return list(find_order(graph, budget_bytes).order)


def find_order(
    graph: StepGraph,
    budget_bytes: int,
    *,
    seconds: float = 8.0,
    progress: Progress | None = None,
    moves: Moves | None = None,
    last_resort: LastResort = LAST_RESORT,
    any_speed: bool = False,
    effort: Effort | None = None,
) -> Found:
    """Finds a fast order within a budget; swaps nothing.

    Args:
        graph: the step, with times.
        budget_bytes: peak of the step.
        seconds: work of the search in nominal seconds, up to four times as much while far from the bound. For a large
            step, three quarters of `seconds`, up to twice `seconds` while very far from the bound.
        progress: called with the name of each start, and the step time of the best program so far.
        moves: functions for swaps, if second runs of ops stand for swaps.
        last_resort: the search for an order of any speed if none is found in time.
        any_speed: whether to search for an order of any speed only, without bounds.
        effort: counts the work.

    Returns:
        The fastest program found.

    Raises:
        BudgetError: if none fits, with the least budget that does.
    """
    own = Effort(effort)
    lean, is_large = leanest(graph), len(graph.ops) > LARGE_STEP

    def within(order: Sequence[int]) -> tuple[Program, Timeline]:
        program = program_within(graph, order, budget_bytes)
        return program, simulate(graph, program)

    def found(order: Sequence[int]) -> Found:
        own.charge_ops(PROGRAM_WORK * len(order))
        program, timeline = (moves.finish if moves else within)(order)
        return Found(order=tuple(order), program=program, timeline=timeline, bound_seconds=bound)

    bound = 0.0 if any_speed else relaxed_bound(graph, budget_bytes, seconds=_ON_BOUND * seconds, effort=own)
    if _peak(lean, baseline_order(graph)) <= budget_bytes:
        bound = min(bound, 0.0)  # a plan without recomputation exists, whatever the solver found in time
        plain = found(baseline_order(graph))
        if plain.timeline.peak_bytes <= budget_bytes:
            return plain
    best: Found | None = None
    pool = Pool()

    def try_filled(fitting: Sequence[int]) -> None:
        nonlocal best
        if moves is not None:
            fitting = moves.ahead(fitting)
        own.charge_ops(PROGRAM_WORK / 2 * len(fitting))
        both = (lean, quicker(graph, fitting, budget_bytes))
        filled = (fill(variants, fitting, budget_bytes, effort=own) for variants in both)
        # Saving more storages may split fused regions, and then cost more time than it saves.
        for order in (fitting, *filled):
            other = found(order)
            if other.timeline.peak_bytes > budget_bytes:
                continue
            pool.add(other.timeline.step_seconds, other.order)
            best = _better(best, other)

    def time_is_up(share: float) -> bool:
        gap = float("inf") if best is None else (best.timeline.step_seconds - graph.seconds - bound) / graph.seconds
        patience = seconds if gap < _FAR else 4 * seconds
        if is_large:
            patience = 0.75 * seconds if best is None or gap < _VERY_FAR else 2 * seconds
        return gap < CLOSE or own.exceeds(share * patience)

    def tell(name: str) -> None:
        if progress is not None:
            progress(name if best is None else f"{name}, best so far {best.timeline.overhead:+.1%} step time")

    in_one_try = any_speed or budget_bytes < widest_op_bytes(graph)
    rotor_first = is_large and moves is not None
    for name, start in () if in_one_try else _starts(lean, budget_bytes, seconds, own, rotor_first=rotor_first):
        tell(name)
        fitting = spill(lean, start, budget_bytes if moves is None else moves.spill_bytes, effort=own)
        if fitting is not None:
            try_filled(fitting)
        if time_is_up(_ON_STARTS if pool.orders else 1.0):
            break
    in_vain = 0
    for fitting in varied(lean, pool, budget_bytes, own) if pool.orders else ():
        if time_is_up(1.0) or in_vain == _IN_VAIN:
            break
        before = best
        tell("variations")
        try_filled(fitting)
        in_vain = in_vain + 1 if best is before else 0
    if best is None:
        least = least_order(
            *(lean,),
            tries=last_resort.tries,
            enough_bytes=budget_bytes if last_resort.stops_early else 0,
            seconds=seconds,
            effort=own,
        )
        if _peak(lean, least) > budget_bytes:
            raise _no_plan(lean, budget_bytes, least)
        tried = (found(order) for order in (fill(lean, least, budget_bytes, effort=own), least))
        best = next((one for one in tried if one.timeline.peak_bytes <= budget_bytes), None)
        if best is None:  # with transfers it takes more memory than the order alone
            raise _no_plan(lean, budget_bytes, least, found(least).timeline.peak_bytes)
    return best


def _better(one: Found | None, other: Found) -> Found:
    if one is None or other.timeline.step_seconds < one.timeline.step_seconds:
        return other
    return one


def _peak(graph: StepGraph, order: Sequence[int]) -> int:
    return simulate(graph, program_of(graph, order)).peak_bytes


def _starts(
    graph: StepGraph, budget_bytes: int, seconds: float, effort: Effort, *, rotor_first: bool
) -> Iterator[tuple[str, list[int]]]:
    """Orders to polish, the most promising and quickest first; rotor's first if there is time for one only."""
    if rotor_first:
        yield from _rotors(graph, budget_bytes, (1.0,), seconds, effort)
    if graph.is_tiled:
        yield from _in_slices(graph, budget_bytes, effort)
    for segments in (1, 6, 3, 12, 20):
        forced = checkpoints(graph, segments)
        selections = select_over_time(
            *(graph, budget_bytes), forced=forced, rounds=8, seconds=1.5, gap=5e-3, effort=effort
        )
        for number, candidate in enumerate(selections):
            yield f"{segments} segments", list(candidate.order)
            if segments == 1 and number == 0:
                # The first selection ignores working sets; where it is too far off, the order of rotor is near at once.
                yield from _rotors(graph, budget_bytes, (1.0,), seconds, effort)
        if segments == 1:
            yield from _rotors(graph, budget_bytes, _MORE_MEMORY, seconds, effort)
    room = budget_bytes - graph.static_bytes
    for share in (0.95, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1):
        selection = select_saved(graph, int(room * share), seconds=0.5, effort=effort)
        if selection is not None:
            effort.charge_ops(len(graph.ops))
            yield f"keep {share:.0%} of what fits", lazy_order(graph, selection.saved)
    for epochs, segments in ((8, 1), (5, 1), (8, 6), (12, 1)):
        forced = checkpoints(graph, segments)
        for candidate in select_over_time(
            *(graph, budget_bytes), epochs=epochs, forced=forced, seconds=4.0, gap=2e-2, effort=effort
        ):
            yield f"{epochs} epochs, {segments} segments", list(candidate.order)


def _in_slices(graph: StepGraph, budget_bytes: int, effort: Effort) -> Iterator[tuple[str, list[int]]]:
    """Orders that save almost nothing between fused regions: first filled for more than the budget, then not filled."""
    for segments, share in _IN_SLICES:
        order = _sliced(graph, segments, effort)
        filled = fill(graph, order, int(share * budget_bytes), effort=effort)
        yield f"{segments} segments in slices, {share:.0%} of the budget", filled
    for segments in (4, 2, 1):
        yield f"{segments} segments in slices", _sliced(graph, segments, effort)


def _sliced(graph: StepGraph, segments: int, effort: Effort) -> list[int]:
    """The order of the lower peak for a number of segments: groups also end with segments, or they do not."""
    saved = checkpoints(graph, segments)
    both = [tiled_order(graph, saved, by_segments=by_segments) for by_segments in (True, False)]
    effort.charge_ops(2 * sum(map(len, both)))
    return min(both, key=lambda order: _peak(graph, order))


def _rotors(
    graph: StepGraph, budget_bytes: int, shares: Sequence[float], seconds: float, effort: Effort
) -> Iterator[tuple[str, list[int]]]:
    """Orders of rotor for shares of the budget; once its table is made, each order takes no time."""
    for more in shares:
        order = rotor.fast_order(graph, int(budget_bytes * more), seconds=seconds, effort=effort)
        if order is not None:
            yield f"rotor with {more:.0%} of the budget", order


def _no_plan(graph: StepGraph, budget_bytes: int, least: list[int], taken_bytes: int = 0) -> BudgetError:
    least_bytes = max(least_budget(graph, least), taken_bytes)
    return no_plan(graph, program_of(graph, least), budget_bytes, least_bytes=least_bytes)
