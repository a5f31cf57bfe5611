"""Where to cut a model whose stages take turns on one device: where least is held, and of such cuts evenly.

One device needs the same time wherever it is cut, so only memory tells. How many micro-batches are in flight at each
stage, at each moment, follows from the schedule alone; with what the calls between two places keep of a micro-batch
that gives what is held at the worst moment. Early stages hold several micro-batches, so they come out small where
nothing else is gained. Cuts are moved one at a time, to the best place between their neighbours, until none moves:
once from even stages, once from cuts as early as possible.

Known limits: the places found are the best for one cut at a time; that a tensor may be held by two stages as one is not
reckoned with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from memfit.planner.pipeline.partition import Demand
from memfit.planner.pipeline.schedule import Action, Pass

__all__ = ["cuts_holding_least"]

_EVENNESS = 0.02
"""Of what the whole model keeps, what even stages may cost."""


def cuts_holding_least(
    order: Sequence[Action], num_places: int, demand: Callable[[int, int], Demand], start: Sequence[int]
) -> list[int]:
    """The places of the cuts.

    Args:
        order: what the device does, in order.
        num_places: how many places there are, with the beginning and the end.
        demand: from two places to what the calls between them take as a stage.
        start: places of cuts between which every stage may be one.
    """
    count = len(start) + 1
    in_flight, acting = _moments(order, count)
    end = num_places - 1
    whole = demand(0, end)
    whole_seconds = whole.forward_seconds + whole.backward_seconds

    def cost(cuts: Sequence[int]) -> float:
        stages = [demand(first, last) for first, last in pairwise([0, *cuts, end])]
        if not all(stage.may_be_stage for stage in stages):
            return float("inf")
        held = in_flight @ np.array([stage.saved_bytes + stage.received_bytes for stage in stages])
        widest = np.array([stage.widest_bytes for stage in stages])[acting]
        slowest = max(stage.forward_seconds + stage.backward_seconds for stage in stages)
        return float((held + widest).max()) + _EVENNESS * whole.saved_bytes * slowest / whole_seconds

    return min((_settled(cuts, end, cost) for cuts in (start, _earliest(count, end, demand))), key=cost)


def _settled(start: Sequence[int], end: int, cost: Callable[[Sequence[int]], float]) -> list[int]:
    """Cuts of which no single one has a better place."""
    cuts = list(start)
    least = cost(cuts)
    moving = True
    while moving:
        moving = False
        for number in range(len(cuts)):
            before, after = [0, *cuts, end][number], [0, *cuts, end][number + 2]
            for place in range(before + 1, after):
                moved = [*cuts[:number], place, *cuts[number + 1 :]]
                found = cost(moved)
                if found < least:
                    least, cuts, moving = found, moved, True
    return cuts


def _earliest(count: int, end: int, demand: Callable[[int, int], Demand]) -> list[int]:
    """Cuts as early as what may be a stage allows, if the last may be one too."""
    cuts: list[int] = []
    for place in range(1, end):
        if len(cuts) < count - 1 and demand(cuts[-1] if cuts else 0, place).may_be_stage:
            cuts.append(place)
    return cuts


def _moments(order: Sequence[Action], count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each moment that differs how many micro-batches are in flight at each stage, and which stage is at work."""
    now = [0] * count
    seen: dict[tuple[tuple[int, ...], int], None] = {}
    for action in order:
        now[action.stage] += action.what is Pass.FORWARD
        seen[tuple(now), action.stage] = None
        now[action.stage] -= action.what in (Pass.BACKWARD, Pass.WEIGHT)
    return np.array([in_flight for in_flight, _ in seen]), np.array([stage for _, stage in seen])
