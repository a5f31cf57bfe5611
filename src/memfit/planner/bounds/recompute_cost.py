"""Least prices of recomputing ops, for a bound that no program can beat.

A recomputation costs least if it writes over an operand that dies at it, or if it runs in slices that are passed on.
Neither is free: an operand that is read later must be recomputed once more, and the slices of a storage that backward
reads must be put together. On the other hand, the first run of an op can write over an operand that is recomputed
later, and the time saved in this way is subtracted.

Known limits: slices are assumed to be put together in memory that was used before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.ir.graph import Phase, StepGraph

__all__ = ["RerunPrice", "rerun_prices", "run_prices", "saved_by_first_runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunPrice:
    """Least times of recomputing an op.

    Attributes:
        alone: by itself.
        slices: in slices that are passed on.
        whole_slices: in slices that are put together.
        is_read_whole: whether backward reads the result, so that it is not only passed on in slices.
    """

    alone: float
    slices: float
    whole_slices: float
    is_read_whole: bool


def rerun_prices(graph: StepGraph) -> list[RerunPrice]:
    """Least times to recompute each op, less the time that the first run of a reader saves by writing over the result.

    These prices hold if no op is counted twice, so that the price of an op that writes over an operand includes
    recomputing this operand once more. A price is below zero where fresh memory costs more than recomputing the result.
    """
    return _prices(graph, saved_by_first_runs(graph), once=True)


def run_prices(graph: StepGraph) -> list[RerunPrice]:
    """Least time of each run of an op after the first, if every run is counted."""
    return _prices(graph, {}, once=False)


def _prices(graph: StepGraph, saved: Mapping[int, float], *, once: bool) -> list[RerunPrice]:
    read_backward = graph.read_whole_backward()
    last_reader, producer, latest = graph.last_readers(), graph.producers(), _latest_use(graph)
    prices: list[RerunPrice] = []
    least: list[float] = []
    for index, op in enumerate(graph.ops):
        later, slices = op.later, op.later.by_slices
        alone = later.least_seconds
        if later.in_place_seconds is not None:
            # An operand that is read after every use of the result must then be recomputed once more.
            again = (
                least[producer[s]] if once and last_reader[s] >= latest[index] and 0 <= producer[s] < index else 0.0
                for s in later.in_place_over
            )
            alone = min(alone, later.in_place_seconds + min(again, default=0.0))
        less = saved.get(index, 0.0)
        in_slices = alone if slices is None else slices.seconds
        least.append(min(alone, in_slices))
        copy = 0.0 if slices is None else min(slices.copy_seconds, slices.copy_over_seconds, alone)
        prices.append(
            RerunPrice(
                alone=alone - less,
                slices=in_slices - less,
                whole_slices=in_slices + copy - less,
                is_read_whole=all(s in read_backward for s in later.writes),
            )
        )
    return prices


def _latest_use(graph: StepGraph) -> list[int]:
    """For each forward op the last backward op that reads its results or anything made from them."""
    until = [-1] * len(graph.storages)
    latest = [-1] * len(graph.ops)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.phase is Phase.FORWARD:
            latest[index] = max((until[s] for s in op.later.writes), default=-1)
        reach = latest[index] if op.phase is Phase.FORWARD else index
        for storage in {*op.reads, *op.later.reads}:
            until[storage] = max(until[storage], reach)
    return latest


def saved_by_first_runs(graph: StepGraph) -> dict[int, float]:
    """By op, time that recomputing it may save: first runs can write over its result although it is read later."""
    last_reader, held = graph.last_readers(), graph.held_to_the_end()
    producer = graph.producers()
    most: dict[int, float] = {}
    for index, op in enumerate(graph.ops):
        if any(last_reader[s] == index and s not in held for s in op.in_place_over):
            continue  # it writes over that operand, which `StepGraph.seconds` counts already
        for storage in op.in_place_over:
            saved = op.least_seconds - op.least_seconds_in_place
            most[storage] = max(most.get(storage, 0.0), saved)
    found: dict[int, float] = {}
    for storage, saved in most.items():
        found[producer[storage]] = found.get(producer[storage], 0.0) + saved
    return found
