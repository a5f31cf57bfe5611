"""Relaxation of the choice of saved storages, for several instants of the backward pass from the loss on.

A relaxation with one instant (`memfit.planner.bounds.relaxation`) does not see that memory is also short in the middle
of the backward pass, where recomputed storages wait for their readers. Here the backward pass is divided into periods,
and each period begins at a wide op. At the beginning of a period each storage is in memory or not, and the storages in
memory fit. A storage that the period reads is in memory at its beginning or recomputed in it. A storage in memory at
the end of the period was in memory at its beginning or was recomputed in it. The op at the beginning of a period runs
in its leanest variant or, where there is room, in a quicker one.

The periods are the leaves of a tree, and the conditions of a period are required of every node. Without this, a
fraction of an operand serves a fraction of a recomputation in each period, and relaxations of integer variables become
weaker with more instants.

Known limits: working sets of recomputed ops are not modelled; instants are chosen by width alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from memfit.ir.graph import StepGraph
from memfit.planner.bounds.recompute_cost import rerun_prices, run_prices, saved_by_first_runs
from memfit.planner.bounds.relaxation import add_slices, is_optional
from memfit.planner.effort import Effort
from memfit.planner.solver import Milp, Status, solve

__all__ = ["least_seconds_over_time"]

_MIB = float(1 << 20)
_INSTANTS = 8
_FEW_INSTANTS = 6
"""Number of instants with integer variables."""


def least_seconds_over_time(
    graph: StepGraph, budget_bytes: int, *, integer: bool, seconds: float, effort: Effort | None = None
) -> float:
    """Least extra seconds any recompute-only program takes within a budget.

    Args:
        graph: the step.
        budget_bytes: peak of the step.
        integer: whether each storage is in memory whole or not at all, which takes seconds to solve; else a part of it
            may be in memory, which takes a fraction of a second and gives a slightly weaker bound.
        seconds: limit of the solver in nominal seconds.
        effort: counts the work.

    Returns:
        A bound, below zero where recomputing saves time; minus infinity if the solver found none in time.
    """
    problem = _problem(graph, budget_bytes, _FEW_INSTANTS if integer else _INSTANTS, integer=integer)
    solution = solve(problem, seconds=seconds, gap=5e-3, effort=effort)
    if integer or solution.status is Status.INFEASIBLE:
        return solution.bound
    return solution.objective if solution.status is Status.OPTIMAL else -np.inf


class _Trade(NamedTuple):
    """A variant of an op: its memory without forward results, and its extra time over the quickest variant."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Periods:
    """The backward pass, divided into periods.

    Attributes:
        starts: the op at which each period begins; the first is the loss.
        reads: by period, the forward storages that its backward ops read and a plan may drop.
        useful: by period, the storages read in it or later, and the operands to recompute them.
    """

    starts: tuple[int, ...]
    reads: tuple[frozenset[int], ...]
    useful: tuple[frozenset[int], ...]


def _problem(graph: StepGraph, budget_bytes: int, instants: int, *, integer: bool) -> Milp:
    held, producer, lasting = graph.held_to_the_end(), graph.producers(), graph.lasting()
    variants = _variants_beside(graph)
    periods = _divided(graph, variants, instants)
    count = len(periods.starts)
    problem = Milp()
    keep = {
        (s, period): problem.variable(integer=integer)
        for period in range(count)
        for s in sorted(periods.useful[period])
    }
    each, once = run_prices(graph), rerun_prices(graph)
    # Two valid ways to count: each recomputation at the price of one of many, or the first at that of a single one.
    cost_of_all: dict[int, float] = {}

    def add_node(start: int, stop: int) -> dict[int, int]:
        """Adds variables for the ops recomputed in periods `start` to `stop`, and rows for the storages they make."""
        possible = {producer[s] for s in periods.useful[start] if s not in lasting}
        runs = {op: problem.variable(integer=False) for op in sorted(possible) if graph.ops[op].recomputable}

        def made(storage: int) -> dict[int, float]:
            index = producer[storage]
            return {runs[index]: 1.0} if index in runs and storage not in lasting else {}

        if stop - start > 1:
            middle = (start + stop) // 2
            halves = add_node(start, middle), add_node(middle, stop)
            for op, variable in runs.items():
                problem.row({variable: -1.0, **{half[op]: 1.0 for half in halves if op in half}}, lower=0.0)
        else:
            cost_of_all.update((variable, each[op].alone) for op, variable in runs.items())
            cost_of_all.update(add_slices(graph, problem, runs, each))
        for s in frozenset[int]().union(*periods.reads[start:stop]):
            problem.row({keep[s, start]: 1.0, **made(s)}, lower=1.0)
        for op, variable in runs.items():
            for s in graph.ops[op].later.reads:
                if is_optional(graph, s, held):
                    problem.row({keep[s, start]: 1.0, variable: -1.0, **made(s)}, lower=0.0)
        for s in periods.useful[stop] if stop < count else ():
            problem.row({keep[s, start]: 1.0, keep[s, stop]: -1.0, **made(s)}, lower=0.0)
        return runs

    runs = add_node(0, count)
    cost_of_first = {variable: once[op].alone for op, variable in runs.items()}
    cost_of_first |= add_slices(graph, problem, runs, once)
    for op, less in saved_by_first_runs(graph).items():
        if op in runs:
            cost_of_all[runs[op]] = cost_of_all.get(runs[op], 0.0) - less
    cost_of_variants = _add_memory(graph, problem, budget_bytes, periods, variants, keep)
    seconds = problem.variable(cost=1.0, lower=-np.inf, upper=np.inf, integer=False)
    for cost in (cost_of_all, cost_of_first):
        terms = {variable: -value for variable, value in (cost | cost_of_variants).items()}
        problem.row({seconds: 1.0, **terms}, lower=0.0)
    return problem


def _add_memory(
    graph: StepGraph,
    problem: Milp,
    budget_bytes: int,
    periods: _Periods,
    variants: Mapping[int, Sequence[_Trade]],
    keep: Mapping[tuple[int, int], int],
) -> dict[int, float]:
    """Makes the storages at the start of each period fit, with the op there in one of its variants or between two.

    Returns:
        By variable, the amount added to the cost.
    """
    costs: dict[int, float] = {}
    for period, start in enumerate(periods.starts):
        for s in graph.ops[start].reads:
            if (s, period) in keep:
                problem.lower[keep[s, period]] = 1.0
        terms = {keep[s, period]: graph.storages[s].nbytes / _MIB for s in periods.useful[period]}
        leanest, *quicker = variants[start]
        costs[problem.variable(lower=1.0, integer=False)] = leanest.seconds
        for before, variant in pairwise([leanest, *quicker]):
            variable = problem.variable(integer=False)
            costs[variable] = variant.seconds - before.seconds
            terms[variable] = (variant.nbytes - before.nbytes) / _MIB
        problem.row(terms, upper=(budget_bytes - leanest.nbytes) / _MIB)
    return costs


def _divided(graph: StepGraph, variants: Mapping[int, Sequence[_Trade]], instants: int) -> _Periods:
    """Periods that begin at the widest ops, none too near to another."""
    held, loss, count = graph.held_to_the_end(), graph.loss_index, len(graph.ops)
    reads = {i: [s for s in graph.ops[i].reads if is_optional(graph, s, held)] for i in range(loss + 1, count)}
    width = {i: variants[i][0].nbytes + sum(graph.storages[s].nbytes for s in reads[i]) for i in reads}
    apart = max(1, (count - loss) // (3 * instants))
    chosen: list[int] = []
    for index in sorted(width, key=lambda i: -width[i]):
        if len(chosen) < instants and all(abs(index - other) > apart for other in chosen):
            chosen.append(index)
    starts = [loss, *sorted(chosen)]
    of = [
        frozenset(s for i in range(max(start, loss + 1), stop) for s in reads[i])
        for start, stop in zip(starts, [*starts[1:], count], strict=True)
    ]
    useful = (_with_operands(graph, frozenset[int]().union(*of[period:])) for period in range(len(of)))
    return _Periods(starts=tuple(starts), reads=tuple(of), useful=tuple(useful))


def _with_operands(graph: StepGraph, storages: Collection[int]) -> frozenset[int]:
    """Storages, and all storages that can be used to recompute them."""
    held, producer, lasting = graph.held_to_the_end(), graph.producers(), graph.lasting()
    found: set[int] = set()
    pending: list[int] = list(storages)
    while pending:
        storage = pending.pop()
        if storage in found:
            continue
        found.add(storage)
        op = graph.ops[producer[storage]]
        if op.recomputable and storage not in lasting:
            pending += [s for s in op.later.reads if is_optional(graph, s, held)]
    return frozenset(found)


def _variants_beside(graph: StepGraph) -> dict[int, list[_Trade]]:
    """Variants of the loss and of each backward op: memory without forward results (static, gradients, own), and time.

    The time is the excess over `StepGraph.first_seconds`. A variant is left out if a mixture of other variants takes no
    more memory and no more time. The leanest variant comes first.
    """
    held, producer, last = graph.held_to_the_end(), graph.producers(), graph.last_readers()
    outputs = {s for s in graph.outputs if not graph.is_free(s)}
    loss, count = graph.loss_index, len(graph.ops)
    more = np.zeros(count + 1, dtype=np.int64)
    for storage, born in enumerate(producer):
        if born >= loss and storage not in outputs:
            more[born] += graph.storages[storage].nbytes
            more[count if storage in held else max(last[storage], born) + 1] -= graph.storages[storage].nbytes
    alive = np.cumsum(more) + graph.static_bytes + sum(graph.storages[s].nbytes for s in outputs)
    found: dict[int, list[_Trade]] = {}
    least = graph.first_seconds()
    for index in range(loss, count):
        op = graph.ops[index]
        in_place = not held.issuperset(op.in_place_over)
        over = graph.storages[op.writes[0]].nbytes if in_place else 0
        variants = [(op.workspace_bytes - over, op.least_seconds_in_place)]
        if op.variants:
            # An op that can be chunked cannot write over an operand when it runs whole.
            variants = [
                (
                    variant.workspace_bytes - over,
                    min(variant.seconds, op.run_seconds(variant.chunks, in_place=in_place)),
                )
                if variant.chunks > 1
                else (variant.workspace_bytes, variant.seconds)
                for variant in op.variants
            ]
        found[index] = _hull(
            _Trade(nbytes=int(alive[index]) + more, seconds=max(0.0, took - least[index])) for more, took in variants
        )
    return found


def _hull(variants: Iterable[_Trade]) -> list[_Trade]:
    """The lower left of the convex hull of points, from the leanest to the quickest."""
    found: list[_Trade] = []
    for variant in sorted(variants):
        if found and variant.seconds >= found[-1].seconds:
            continue
        while len(found) > 1 and _slope(found[-2], variant) <= _slope(found[-2], found[-1]):
            found.pop()
        found.append(variant)
    return found


def _slope(one: _Trade, other: _Trade) -> float:
    return (other.seconds - one.seconds) / (other.nbytes - one.nbytes)
