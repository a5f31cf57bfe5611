"""The least peak: an order of about the lowest peak that this planner can reach.

Starts from orders that save checkpoints only, and spills storages towards a target peak. Each target halves the
interval between the lowest peak reached and a peak that could not be reached. The widest op (`widest_op_bytes`) is the
lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.ir.graph import StepGraph
from memfit.ir.program import program_of
from memfit.planner.bounds.lower_bound import LARGE_STEP, widest_op_bytes
from memfit.planner.effort import Effort, search_limit
from memfit.planner.search.checkpoints import checkpoints
from memfit.planner.search.lazy_recompute import lazy_order, tiled_order
from memfit.planner.search.spill_and_fill import spill
from memfit.sim.simulator import simulate

__all__ = ["LAST_RESORT", "LEAST_TRIES", "LastResort", "least_budget", "least_order"]

LEAST_TRIES = 12
"""Number of times the interval of the least peak is halved; enough to come near any least peak."""

_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_NEAR = 0.004
"""Relative width of the interval at which the search stops; `_NEAR_IF_LARGE` for a large step."""

_NEAR_IF_LARGE = 0.01
_MARGIN = 0.003
_LONGEST = 6
"""Longest order of a tiled step that can be a useful plan, in multiples of the number of ops of the step."""

_STARTS = 6
"""Number of orders spilled towards a target; only `_STARTS_IF_TILED` in a tiled step, whose orders are long."""

_STARTS_IF_TILED = 2
_LEAST_SECONDS = 1.0
"""Least time limit of a search, so that the least budget in an error is about right; small steps need no more."""

_ROUNDS = 400_000
"""Rounds of drops tried for one target, times the number of ops of the step: this work takes some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastResort:
    """The search for an order of any speed, after a search for fast ones found none.

    Attributes:
        tries: how often to halve the interval of the least budget, which an error states.
        stops_early: whether the first order within the budget is good enough; otherwise only the error is wanted.
    """

    tries: int = LEAST_TRIES
    stops_early: bool = True


LAST_RESORT = LastResort()


def least_budget(graph: StepGraph, order: Sequence[int]) -> int:
    """The budget at which an order of `least_order` fits: a little more than its predicted peak.

    A measured peak that differs a little from the prediction then still fits.
    """
    return int(_peak(graph, order) * (1 + _MARGIN)) + 1024


def least_order(
    graph: StepGraph,
    *,
    tries: int = LEAST_TRIES,
    enough_bytes: int = 0,
    seconds: float = 8.0,
    effort: Effort | None = None,
) -> list[int]:
    """An order of about the least peak.

    Args:
        graph: the step.
        tries: largest number of times the interval is halved.
        enough_bytes: a peak that need not be lowered further.
        seconds: nominal seconds (at least one) after which no further target is tried; after twice as many the current
            target is given up. Four times as many if `enough_bytes` is given, so that an order that one search found is
            found again by another.
        effort: counts the work.

    Returns:
        A valid order; its simulated peak is the least budget, or low enough.
    """
    own = Effort(effort)
    seconds = max(_LEAST_SECONDS, (4 if enough_bytes else 1) * search_limit(seconds))
    starts = _low_starts(graph, own, seconds)
    best = starts[0]
    high = _peak(graph, best)
    low = widest_op_bytes(graph)
    near = _NEAR if len(graph.ops) <= LARGE_STEP else _NEAR_IF_LARGE
    count = _STARTS_IF_TILED if graph.is_tiled else _STARTS
    rounds = min(400, _ROUNDS // len(graph.ops))

    def reach(target: int) -> list[int] | None:
        spilled = (
            spill(graph, start, target, rounds=rounds, effort=own, seconds=2 * seconds)
            for start in [best, *starts[:count]]
        )
        return next((order for order in spilled if order is not None), None)

    if low < enough_bytes < high and (reached := reach(enough_bytes)) is not None:
        return reached
    for _ in range(tries):
        if high <= enough_bytes or high - low < near * high or own.exceeds(seconds):
            break
        target = (high + low) // 2
        reached = reach(target)
        if reached is None:
            low = target
        else:
            best, high = reached, _peak(graph, reached)
    return best


def _low_starts(graph: StepGraph, effort: Effort, seconds: float) -> list[list[int]]:
    """Orders of low peak, regardless of their time, the lowest first."""
    orders: list[list[int]] = []
    for segments in _SEGMENTS:
        orders.append(lazy_order(graph, checkpoints(graph, segments)))
        effort.charge_ops(2 * len(orders[-1]))
        if effort.exceeds(seconds):
            break
    if graph.is_tiled:
        sliced = (
            tiled_order(graph, checkpoints(graph, segments), forward=forward, by_segments=by_segments)
            for forward, by_segments in ((False, True), (False, False), (True, False))
            for segments in _SEGMENTS
        )
        for order in sliced:
            orders += [order] if len(order) <= _LONGEST * len(graph.ops) else []
            effort.charge_ops(2 * len(order))
            if effort.exceeds(seconds):
                break
    return sorted(orders, key=lambda order: _peak(graph, order))


def _peak(graph: StepGraph, order: Sequence[int]) -> int:
    return simulate(graph, program_of(graph, order)).peak_bytes
