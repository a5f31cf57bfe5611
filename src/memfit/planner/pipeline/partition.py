"""Partition of a model into stages: by measured time within the memory, not by the number of layers.

A dynamic program runs over the places at which a cut is possible. The slowest stage decides the time of a step, so its
time is minimized, and among equal divisions the sum of the times. The recomputation that a stage will need under its
budget is guessed here (cheap results are dropped first, so the cost grows with the square of the share that is
dropped). The planner of steps then plans each stage, and its plans correct the guess for another round
(`memfit.pipelining.search.search`).

If several stages use a parameter, each of them adds up its own gradients of it. The result is the sum of the
unpipelined pass, bit for bit, if only the last of these stages uses the parameter more than once; a caller that needs
this says so (`in_order`).

Sources: torchgpipe balances times of layers alone (block partitions of Barany and Grolmusz); in AdaPipe (Sun et al.,
ASPLOS 2024) stages of different depth recompute different amounts, since they hold different numbers of micro-batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["CallCost", "CutPlace", "Demand", "balance", "demands", "guessed_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """Time, memory and parameters of one call of the model for one micro-batch.

    Attributes:
        forward_seconds: time of its ops in the forward pass.
        backward_seconds: time of its ops in the backward pass.
        saved_bytes: bytes of its results that the backward pass reads.
        widest_bytes: the least memory in which any single op of it can run.
        states: the parameters it reads, by name.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_bytes: int = 0
    widest_bytes: int = 0
    states: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlace:
    """A place between calls: how many calls come before it, and the bytes that would cross a cut there."""

    position: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Time and memory that a run of calls takes as a stage, with nothing recomputed.

    Attributes:
        forward_seconds: forward time of one micro-batch.
        backward_seconds: backward time of one micro-batch.
        static_bytes: bytes of parameters with gradients and optimizer state.
        saved_bytes: bytes saved of one micro-batch between its passes.
        received_bytes: bytes that cross the cut before the stage.
        widest_bytes: the least memory in which any single op can run.
        may_be_stage: whether the run can be a stage: it trains something, and adds gradients up in order where
            required.
    """

    forward_seconds: float
    backward_seconds: float
    static_bytes: int
    saved_bytes: int
    received_bytes: int
    widest_bytes: int
    may_be_stage: bool


def demands(
    calls: Sequence[CallCost],
    places: Sequence[CutPlace],
    state_bytes: Mapping[str, int],
    *,
    in_order: Collection[str] = (),
) -> Callable[[int, int], Demand]:
    """Time and memory that each run of calls between two places takes as a stage.

    Args:
        calls: the calls, in order.
        places: the places where a cut is possible, in order, with the beginning and the end.
        state_bytes: for each parameter its bytes with its gradient and optimizer state.
        in_order: parameters whose gradients have to be added up in the order of the unpipelined pass.

    Returns:
        A function from the numbers of two places to the demand of the calls between them.
    """
    forward = list(accumulate((c.forward_seconds for c in calls), initial=0.0))
    backward = list(accumulate((c.backward_seconds for c in calls), initial=0.0))
    saved = list(accumulate((c.saved_bytes for c in calls), initial=0))
    used_at = [[number for number, call in enumerate(calls) if name in call.states] for name in in_order]
    known: dict[tuple[int, int], Demand] = {}

    def in_another_order(begin: int, end: int) -> bool:
        return any(bisect_left(at, end) - bisect_left(at, begin) > 1 and at[-1] >= end for at in used_at)

    def demand(first: int, last: int) -> Demand:
        if (first, last) not in known:
            begin, end = places[first].position, places[last].position
            inside = calls[begin:end]
            names = frozenset[str]().union(*(c.states for c in inside))
            known[first, last] = Demand(
                forward_seconds=forward[end] - forward[begin],
                backward_seconds=backward[end] - backward[begin],
                static_bytes=sum(state_bytes[name] for name in names),
                saved_bytes=saved[end] - saved[begin],
                received_bytes=places[first].nbytes,
                widest_bytes=max((c.widest_bytes for c in inside), default=0),
                # A stage that passes gradients on and has none itself is no step.
                may_be_stage=backward[end] > backward[begin] and not in_another_order(begin, end),
            )
        return known[first, last]

    return demand


def guessed_seconds(demand: Demand, budget_bytes: int | None, in_flight: int) -> float:
    """Time of one micro-batch at a stage with the recomputation that its budget requires; infinite if it cannot fit."""
    plain = demand.forward_seconds + demand.backward_seconds
    if not demand.may_be_stage:
        return float("inf")
    if budget_bytes is None:
        return plain
    held = demand.static_bytes + in_flight * demand.received_bytes
    room = budget_bytes - held - demand.widest_bytes
    if room < 0:
        return float("inf")
    over = in_flight * demand.saved_bytes - room
    if over <= 0 or not demand.saved_bytes:
        return plain
    dropped = min(1.0, over / (in_flight * demand.saved_bytes))
    return plain + demand.forward_seconds * dropped * dropped


def balance(
    count: int, num_places: int, seconds: Callable[[int, int, int], float], crossing_seconds: Callable[[int], float]
) -> list[int] | None:
    """Divides the calls between places into stages.

    Args:
        count: number of stages.
        num_places: number of places, with the beginning and the end.
        seconds: time of one micro-batch at a stage, given the number of the stage and the two places.
        crossing_seconds: time to send the tensors that cross at a place.

    Returns:
        The places of the cuts; None if no division is possible.
    """
    end = num_places - 1
    nothing = (float("inf"), float("inf"))
    best: list[dict[int, tuple[float, float]]] = [{0: (0.0, 0.0)}]
    came_from: list[dict[int, int]] = [{}]
    for stage in range(count):
        reached: dict[int, tuple[float, float]] = {}
        source: dict[int, int] = {}
        ends = [end] if stage == count - 1 else range(stage + 1, end)
        for last in ends:
            for first, (slowest, total) in best[stage].items():
                if first >= last or (slowest, total) >= reached.get(last, nothing):
                    continue
                here = seconds(stage, first, last) + (crossing_seconds(last) if last != end else 0.0)
                value = (max(slowest, here), total + here)
                if value < reached.get(last, nothing):
                    reached[last], source[last] = value, first
        best.append(reached)
        came_from.append(source)
    if end not in best[count]:
        return None
    cuts = []
    place = end
    for stage in range(count, 1, -1):
        place = came_from[stage][place]
        cuts.append(place)
    return cuts[::-1]
