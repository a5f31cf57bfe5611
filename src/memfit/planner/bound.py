"""The relaxed bound: no plan that only recomputes can cost less than this.

Choose the forward storages kept through the loss and the ops run again, at least cost, such that whatever the
backward pass reads is kept or run again, an op that runs again has its operands kept or run again, and what
is kept fits beside what the step holds anyway. Working sets and repeated recomputation are ignored, hence a
bound; it is also a good first guess of what to keep.

The least peak is bounded by the widest op: its operands, results and workspace, static bytes and the
gradients produced before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.planner.prices import RerunPrice, rerun_prices
from memfit.planner.solver import Milp, Status, solve
from memfit.step.graph import Phase, StepGraph, StorageKind

__all__ = ["Selection", "backward_reads", "op_wall_bytes", "relaxed_bound", "select_kept"]

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


def relaxed_bound(graph: StepGraph, budget_bytes: int, *, seconds: float = 5.0) -> float:
    """Least extra seconds any recompute-only program takes within a budget; infinite if none fits."""
    held = sum(graph.storages[s].nbytes for s in set(graph.outputs) if not graph.is_free(s))
    room = budget_bytes - graph.static_bytes - held
    selection = select_kept(graph, room, seconds=seconds)
    return float("inf") if selection is None else selection.bound_seconds


def select_kept(graph: StepGraph, room_bytes: int, *, seconds: float = 5.0, gap: float = 2e-3) -> Selection | None:
    """Solves the relaxation for a number of bytes that may be kept.

    Args:
        graph: the step.
        room_bytes: for kept storages, beside static bytes and what the caller holds.
        seconds: time limit of the solver; the bound stays valid when it strikes.
        gap: relative gap at which the solver stops.

    Returns:
        The selection, or None if nothing fits.
    """
    if room_bytes < 0:
        return None
    producer = graph.producers()
    held = graph.held_to_the_end()
    lasting = graph.lasting()
    needed = backward_reads(graph)
    problem = Milp()
    keep: dict[int, int] = {}
    rerun: dict[int, int] = {}
    prices = rerun_prices(graph)

    def rerun_variable(op: int) -> int:
        if op not in rerun:
            rerun[op] = problem.variable(cost=prices[op].alone)
        return rerun[op]

    pending = [s for s in needed if _optional(graph, s, held)]
    rows: list[tuple[int, int | None]] = [(s, None) for s in pending]
    while pending:
        storage = pending.pop()
        if storage in keep:
            continue
        op = graph.ops[producer[storage]]
        keep[storage] = problem.variable(lower=0.0 if op.recomputable and storage not in lasting else 1.0)
        if op.recomputable and producer[storage] not in rerun:
            variable = rerun_variable(producer[storage])
            for operand in op.reads:
                if _optional(graph, operand, held):
                    rows.append((operand, variable))
                    pending.append(operand)
    if not keep:
        return Selection(kept=frozenset(), recompute_seconds=0.0, bound_seconds=0.0)
    for storage, consumer in rows:
        terms = {keep[storage]: 1.0}
        if graph.ops[producer[storage]].recomputable:
            terms[rerun[producer[storage]]] = 1.0
        if consumer is not None:
            terms[consumer] = terms.get(consumer, 0.0) - 1.0
        problem.row(terms, lower=0.0 if consumer is not None else 1.0)
    problem.row({variable: graph.storages[s].nbytes / _MIB for s, variable in keep.items()}, upper=room_bytes / _MIB)
    _add_slices(graph, problem, rerun, prices)
    # Others are implied integer or may be fractions: the bound is valid all the same.
    for variable in set(range(len(problem.integer))).difference(keep.values()):
        problem.integer[variable] = False
    solution = solve(problem, seconds=seconds, gap=gap)
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        return None
    kept = frozenset(s for s, variable in keep.items() if solution.values[variable] > 0.5)
    return Selection(
        kept=kept, recompute_seconds=solution.objective, bound_seconds=min(solution.bound, solution.objective)
    )


def _add_slices(graph: StepGraph, problem: Milp, rerun: Mapping[int, int], prices: Sequence[RerunPrice]) -> None:
    """Lets ops run again in slices; what hands on its result does so to an op in slices."""
    readers: dict[int, list[int]] = {}
    for index in rerun:
        for storage in graph.ops[index].later.reads:
            readers.setdefault(storage, []).append(index)
    in_slices: dict[int, list[int]] = {}
    handed_on: dict[int, int] = {}
    for index, variable in rerun.items():
        price = prices[index]
        cheaper = [price.whole_slices, *([] if price.is_read_whole else [price.slices])]
        variables = [problem.variable(cost=seconds - price.alone) for seconds in cheaper if seconds < price.alone]
        if not variables:
            continue
        in_slices[index] = variables
        if not price.is_read_whole and price.slices < price.alone:
            handed_on[index] = variables[-1]
        problem.row({variable: 1.0, **dict.fromkeys(variables, -1.0)}, lower=0.0)
    for index, variable in handed_on.items():
        taken = [v for s in graph.ops[index].later.writes for r in readers.get(s, ()) for v in in_slices.get(r, ())]
        problem.row({variable: -1.0, **dict.fromkeys(taken, 1.0)}, lower=0.0)


def op_wall_bytes(graph: StepGraph) -> int:
    """The widest op, run its leanest way: operands, results, workspace, static bytes, gradients already produced."""
    held = graph.held_to_the_end()
    produced: set[int] = set()
    wall = graph.static_bytes
    for op in graph.ops:
        touched = {s for s in (*op.reads, *op.writes) if not graph.is_free(s)} | produced
        nbytes = sum(graph.storages[s].nbytes for s in touched)
        if not held.issuperset(op.in_place_over):
            nbytes -= graph.storages[op.writes[0]].nbytes
        workspace = min((way.workspace_bytes for way in op.ways), default=op.workspace_bytes)
        wall = max(wall, graph.static_bytes + nbytes + workspace)
        produced.update(s for s in op.writes if s in held)
    if graph.after_step_bytes:
        wall = max(wall, graph.static_bytes + graph.gradient_bytes + graph.after_step_bytes)
    return wall


def backward_reads(graph: StepGraph) -> list[int]:
    """Storages that backward ops read, in the order of their first read."""
    reads = (s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads)
    return list(dict.fromkeys(reads))


def _optional(graph: StepGraph, storage: int, held: frozenset[int]) -> bool:
    return graph.storages[storage].kind is StorageKind.FORWARD and storage not in held
