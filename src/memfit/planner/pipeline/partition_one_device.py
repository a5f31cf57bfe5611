"""Partition of a model whose stages take turns on one device: least memory held, and among such cuts even stages.

One device needs the same time wherever the model is cut, so only memory decides. The number of micro-batches in flight
at each stage, at each moment, follows from the schedule alone. Together with the bytes that the calls between two
places save of a micro-batch, it gives the bytes held at the worst moment. Early stages hold several micro-batches, so
they become small where nothing else is gained. Cuts are moved one at a time, to the best place between their
neighbours, until no cut moves: once starting from even stages, once from the earliest possible cuts.

Known limits: the places found are the best for one cut at a time; two stages that hold the same tensor are not counted
as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from memfit.planner.pipeline.partition import Demand
from memfit.planner.pipeline.schedule import Action, Pass

__all__ = ["cuts_holding_least"]

_EVENNESS = 0.02
"""Memory that even stages may cost, as a share of the bytes that the whole model saves."""


def cuts_holding_least(
    order: Sequence[Action], num_places: int, demand: Callable[[int, int], Demand], start: Sequence[int]
) -> list[int]:
    """The places of the cuts.

    Args:
        order: actions of the device, in order.
        num_places: number of places, with the beginning and the end.
        demand: function from two places to the demand of the calls between them as a stage.
        start: places of cuts between which every run of calls may be a stage.
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
    """Cuts such that no single cut has a better place."""
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
    """The earliest cuts between which every run of calls may be a stage, if the last run may be one too."""
    cuts: list[int] = []
    for place in range(1, end):
        if len(cuts) < count - 1 and demand(cuts[-1] if cuts else 0, place).may_be_stage:
            cuts.append(place)
    return cuts


def _moments(order: Sequence[Action], count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each distinct moment the number of micro-batches in flight at each stage, and the stage that runs."""
    now = [0] * count
    seen: dict[tuple[tuple[int, ...], int], None] = {}
    for action in order:
        now[action.stage] += action.what is Pass.FORWARD
        seen[tuple(now), action.stage] = None
        now[action.stage] -= action.what in (Pass.BACKWARD, Pass.WEIGHT)
    return np.array([in_flight for in_flight, _ in seen]), np.array([stage for _, stage in seen])
