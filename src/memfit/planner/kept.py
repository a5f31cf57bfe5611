"""What to keep through the loss: a relaxation that knows one instant.

Choose the forward storages kept through the loss and the ops run again, at least cost, such that whatever the
backward pass reads is kept or run again, an op that runs again has its operands kept or run again, and what
is kept fits beside what the step holds anyway. Working sets and repeated recomputation are ignored, hence it is a
lower bound (`memfit.planner.bound`), and a good first guess of what to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.planner.prices import RerunPrice, rerun_prices, saved_by_first_runs
from memfit.planner.solver import Milp, Status, solve
from memfit.step.graph import Phase, StepGraph, StorageKind

__all__ = ["Selection", "add_slices", "backward_reads", "is_optional", "select_kept"]

_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which storages to keep.

    Attributes:
        kept: forward storages alive at the loss, beside what the caller holds.
        recompute_seconds: time of the ops run again for the others.
        bound_seconds: no selection within the budget takes less; below zero where running again saves time.
    """

    kept: frozenset[int]
    recompute_seconds: float
    bound_seconds: float


def select_kept(graph: StepGraph, room_bytes: int, *, seconds: float = 5.0, gap: float = 2e-3) -> Selection | None:
    """Solves the relaxation for a number of bytes that may be kept.

    Args:
        graph: the step.
        room_bytes: for kept storages, beside static bytes and what the caller holds.
        seconds: time limit of the solver; the bound stays valid when it strikes.
        gap: relative gap at which the solver stops.

    Returns:
        The selection, or None if nothing fits. Where the solver finds none in time, it keeps nothing.
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
        return Selection(kept=frozenset(), recompute_seconds=0.0, bound_seconds=0.0)
    for storage, consumer in rows:
        terms = {keep[storage]: 1.0}
        if producer[storage] in rerun and storage not in lasting:
            terms[rerun[producer[storage]]] = 1.0
        if consumer is not None:
            terms[consumer] = terms.get(consumer, 0.0) - 1.0
        problem.row(terms, lower=0.0 if consumer is not None else 1.0)
    problem.row({variable: graph.storages[s].nbytes / _MIB for s, variable in keep.items()}, upper=room_bytes / _MIB)
    for variable, less in add_slices(graph, problem, rerun, prices).items():
        problem.cost[variable] = less
    solution = solve(problem, seconds=seconds, gap=gap)
    if solution.status is Status.INFEASIBLE:
        return None
    if solution.status is Status.UNKNOWN:
        least = max(solution.bound, -sum(saved_by_first_runs(graph).values()))
        return Selection(kept=frozenset(), recompute_seconds=float("inf"), bound_seconds=least)
    kept = frozenset(s for s, variable in keep.items() if solution.values[variable] > 0.5)
    return Selection(
        kept=kept, recompute_seconds=solution.objective, bound_seconds=min(solution.bound, solution.objective)
    )


def add_slices(
    graph: StepGraph, problem: Milp, rerun: Mapping[int, int], prices: Sequence[RerunPrice]
) -> dict[int, float]:
    """Lets ops run again in slices; what hands on its result does so to an op in slices.

    Args:
        graph: the step.
        problem: variables and rows are added to it.
        rerun: by op, the variable that says whether it runs again.
        prices: of all ops.

    Returns:
        What each new variable adds to the cost, below zero.
    """
    readers: dict[int, list[int]] = {}
    for index in rerun:
        for storage in graph.ops[index].later.reads:
            readers.setdefault(storage, []).append(index)
    in_slices: dict[int, list[int]] = {}
    handed_on: dict[int, int] = {}
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
            handed_on[index] = in_slices[index][-1]
        problem.row({variable: 1.0, **dict.fromkeys(less, -1.0)}, lower=0.0)
    for index, variable in handed_on.items():
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
