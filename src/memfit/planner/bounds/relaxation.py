"""Relaxation of the choice of saved storages, for one instant: the loss.

The relaxation selects the forward storages saved through the loss, the swapped storages and the ops to recompute, at
least cost. Every storage that the backward pass reads, and every operand of a recomputed op, is saved, swapped or
recomputed. Saved storages fit in addition to the memory that the step holds in every plan. Swapped storages have left
before the loss and are back in time, or compute waits. Working sets and repeated recomputation are ignored, hence the
result is a lower bound (`memfit.planner.bounds.lower_bound`), and a good first guess of the storages to save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.tiers import Tier, slot_bytes
from memfit.planner.bounds.recompute_cost import RerunPrice, rerun_prices, saved_by_first_runs
from memfit.planner.effort import Effort
from memfit.planner.offload.model import swappable
from memfit.planner.solver import Milp, Status, solve

__all__ = ["Selection", "add_slices", "backward_reads", "is_optional", "select_saved"]

_MIB = float(1 << 20)
_DEADLINES = 100
"""Approximate number of deadlines for swaps in each pass; with more deadlines the solver takes longer."""

_PREFERENCE = 1e-13
"""Seconds per byte charged to a tier for each tier before it in the user's order; this decides where all of them can
carry the storages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The storages to save and to swap, with their cost.

    Attributes:
        saved: forward storages alive at the loss, without those that the caller holds.
        swapped: the tier of each forward storage that is on a tier at the loss.
        recompute_seconds: time of the ops recomputed for the others, and cost of the swaps.
        bound_seconds: no selection within the budget takes less; below zero where recomputing saves time.
    """

    saved: frozenset[int]
    recompute_seconds: float
    bound_seconds: float
    swapped: Mapping[int, Tier] = field(default_factory=dict)


def select_saved(
    graph: StepGraph,
    room_bytes: int,
    *,
    seconds: float = 5.0,
    gap: float = 2e-3,
    link_share: float = 1.0,
    staying: Collection[int] = (),
    overlapping: bool = False,
    effort: Effort | None = None,
) -> Selection | None:
    """Solves the relaxation for a number of bytes that may be saved.

    Args:
        graph: the step.
        room_bytes: memory for saved storages, without static bytes and storages that the caller holds.
        seconds: limit of the solver in nominal seconds; the bound stays valid when the limit is reached.
        gap: relative gap at which the solver stops.
        link_share: share of the link rate that the relaxation assumes.
        staying: storages that must not be swapped.
        overlapping: whether recomputation hides transfers back, as it may. The bound needs this; a selection is better
            without it, since most recomputation runs when links are idle or memory is full.
        effort: counts the work.

    Returns:
        The selection, or None if nothing fits. If the solver finds none in time, it saves nothing.
    """
    if room_bytes < 0:
        return None
    producer, held = graph.producers(), graph.held_to_the_end()
    lasting = graph.lasting()
    problem = Milp()
    keep: dict[int, int] = {}
    rerun: dict[int, int] = {}
    prices = rerun_prices(graph)
    pending = [s for s in backward_reads(graph) if is_optional(graph, s, held)]
    rows: list[tuple[int, int | None]] = [(s, None) for s in pending]
    while pending:
        storage = pending.pop()
        if storage in keep:
            continue
        keep[storage] = problem.variable()
        index = producer[storage]
        op = graph.ops[index]
        if op.recomputable and storage not in lasting and index not in rerun:
            rerun[index] = problem.variable(cost=prices[index].alone, integer=False)
            operands = [s for s in op.later.reads if is_optional(graph, s, held)]
            rows += [(operand, rerun[index]) for operand in operands]
            pending += operands
    if not keep:
        return Selection(saved=frozenset(), recompute_seconds=0.0, bound_seconds=0.0)
    movable = [s for s in swappable(graph) if s in keep and s not in staying] if graph.tiers else []
    swap, waits = _add_swaps(graph, problem, movable, link_share)
    for storage, consumer in rows:
        terms = {keep[storage]: 1.0, **dict.fromkeys(swap.get(storage, {}).values(), 1.0)}
        if producer[storage] in rerun and storage not in lasting:
            terms[rerun[producer[storage]]] = 1.0
        if consumer is not None:
            terms[consumer] = terms.get(consumer, 0.0) - 1.0
        problem.row(terms, lower=0.0 if consumer is not None else 1.0)
    problem.row({variable: graph.storages[s].nbytes / _MIB for s, variable in keep.items()}, upper=room_bytes / _MIB)
    for variable, less in add_slices(graph, problem, rerun, prices).items():
        problem.cost[variable] = less
    if overlapping:
        _overlap(problem, waits, sum(saved_by_first_runs(graph).values()))
    solution = solve(problem, seconds=seconds, gap=gap, effort=effort)
    if solution.status is Status.INFEASIBLE:
        return None
    if solution.status is Status.UNKNOWN:
        least = max(solution.bound, -sum(saved_by_first_runs(graph).values()))
        return Selection(saved=frozenset(), recompute_seconds=float("inf"), bound_seconds=least)
    saved = frozenset(s for s, variable in keep.items() if solution.values[variable] > 0.5)
    swapped = {
        s: tier
        for s, of in swap.items()
        for tier, variable in of.items()
        if solution.values[variable] > 0.5 and s not in saved
    }
    return Selection(
        saved=saved,
        recompute_seconds=solution.objective,
        bound_seconds=min(solution.bound, solution.objective),
        swapped=swapped,
    )


def _add_swaps(
    graph: StepGraph, problem: Milp, movable: Sequence[int], link_share: float
) -> tuple[dict[int, dict[Tier, int]], list[int]]:
    """Adds variables for the swap of each storage to each tier, and rows that make compute wait for links.

    Before the loss, storages made at some time or later must be swapped out by the loss. After it, storages needed
    before some time must be swapped in by that time. Compute waits for late transfers.

    Returns:
        The variables by storage and tier, and those of the waits after the loss.
    """
    begins = _begins(graph)
    loss = begins[graph.loss_index]
    producer = graph.producers()
    needed = {s: i for i in range(len(graph.ops) - 1, graph.loss_index, -1) for s in graph.ops[i].reads}
    candidates = [s for s in movable if s in needed]
    found: dict[int, dict[Tier, int]] = {s: {} for s in candidates}
    waits: list[int] = []
    for number, links in enumerate(graph.tiers):
        per_byte = links.out.compute_seconds_per_byte + links.into.compute_seconds_per_byte + number * _PREFERENCE
        for s in candidates:
            found[s][links.tier] = problem.variable(cost=per_byte * graph.storages[s].nbytes)
        left = [(loss - begins[producer[s] + 1], s) for s in candidates]
        back = [(begins[needed[s]] - loss, s) for s in candidates]
        for link, due in ((links.out, left), (links.into, back)):
            wait = problem.variable(cost=1.0, upper=np.inf, integer=False)
            terms: dict[int, float] = {}
            due.sort()
            for place, (seconds, s) in enumerate(due):
                terms[found[s][links.tier]] = link.seconds(graph.storages[s].nbytes) / link_share
                if place + 1 == len(due) or due[place + 1][0] > seconds + loss / _DEADLINES:
                    problem.row({**terms, wait: -1.0}, upper=seconds)
        waits.append(wait)
        if links.limit_bytes is not None:
            sizes = {found[s][links.tier]: slot_bytes(graph.storages[s].nbytes) / _MIB for s in candidates}
            problem.row(sizes, upper=links.limit_bytes / _MIB)
    return found, waits


def _overlap(problem: Milp, waits: Sequence[int], saved_seconds: float) -> None:
    """Makes the cost the maximum of the costs without waits after the loss and of each such wait less saved time."""
    costs = {variable: cost for variable, cost in enumerate(problem.cost) if cost and variable not in waits}
    problem.cost = [0.0] * len(problem.cost)
    seconds = problem.variable(cost=1.0, lower=-np.inf, upper=np.inf, integer=False)
    problem.row({seconds: 1.0, **{variable: -cost for variable, cost in costs.items()}}, lower=0.0)
    for wait in waits:
        problem.row({seconds: 1.0, wait: -1.0}, lower=-saved_seconds)


def _begins(graph: StepGraph) -> list[float]:
    """Earliest time at which each op begins."""
    return [0.0, *accumulate(graph.first_seconds())]


def add_slices(
    graph: StepGraph, problem: Milp, rerun: Mapping[int, int], prices: Sequence[RerunPrice]
) -> dict[int, float]:
    """Lets ops be recomputed in slices; an op can pass on its result in slices only to an op that runs in slices.

    Args:
        graph: the step.
        problem: variables and rows are added to it.
        rerun: by op, the variable that says whether it is recomputed.
        prices: of all ops.

    Returns:
        By new variable, the amount added to the cost, below zero.
    """
    readers: dict[int, list[int]] = {}
    for index in rerun:
        for storage in graph.ops[index].later.reads:
            readers.setdefault(storage, []).append(index)
    in_slices: dict[int, list[int]] = {}
    passed_on: dict[int, int] = {}
    costs: dict[int, float] = {}
    for index, variable in rerun.items():
        price = prices[index]
        cheaper = [price.whole_slices, *([] if price.is_read_whole else [price.slices])]
        less = {problem.variable(integer=False): s - price.alone for s in cheaper if s < price.alone}
        if not less:
            continue
        costs |= less
        in_slices[index] = [*less]
        if not price.is_read_whole and price.slices < price.alone:
            passed_on[index] = in_slices[index][-1]
        problem.row({variable: 1.0, **dict.fromkeys(less, -1.0)}, lower=0.0)
    for index, variable in passed_on.items():
        taken = [v for s in graph.ops[index].later.writes for r in readers.get(s, ()) for v in in_slices.get(r, ())]
        problem.row({variable: -1.0, **dict.fromkeys(taken, 1.0)}, lower=0.0)
    return costs


def backward_reads(graph: StepGraph) -> list[int]:
    """Storages that backward ops read, in the order of their first read."""
    reads = (s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads)
    return list(dict.fromkeys(reads))


def is_optional(graph: StepGraph, storage: int, held: frozenset[int]) -> bool:
    """Whether a plan may drop a storage: a forward result that the caller does not hold."""
    return graph.storages[storage].kind is StorageKind.FORWARD and storage not in held
