"""`milp`: the fastest program there is on a small graph, with the ops in their captured order.

Time is cut at every op, so an op may run again before any backward op. For stage `t` (the `t`-th op of the
step) `run[t, i]` says that op `i` runs in it and `have[t, s]` that storage `s` is there when it begins. Memory is
constrained at every run of every stage by a chain of variables that say what has been freed by then.

Source: Jain et al., "Checkmate" (MLSys 2020), with frees by last use. The tests hold every other strategy
against it.

Known limits: the number of variables grows with the square of the ops, so large graphs are refused; in-place
ops are taken where they follow from the order, but not planned for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.errors import BudgetError, SpecError
from memfit.planner.least import least_order
from memfit.planner.solver import Milp, Status, solve
from memfit.step.graph import Phase, StepGraph, StorageKind
from memfit.step.program import plain_order, program_of
from memfit.step.simulate import simulate
from memfit.units import format_bytes

__all__ = ["order"]

_MOST_OPS = 60
_SECONDS = 60.0


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """The least time within the budget.

    Raises:
        SpecError: if the graph is too large.
        BudgetError: if nothing fits.
    """
    if budget_bytes is None:
        return plain_order(graph)
    if len(graph.ops) > _MOST_OPS:
        raise SpecError(f"strategy 'milp' takes at most {_MOST_OPS} ops (ops: {len(graph.ops)}); use 'auto'")
    problem, run = _formulate(graph, budget_bytes)
    if not problem.cost:
        found = plain_order(graph)
    else:
        solution = solve(problem, seconds=_SECONDS, gap=0.0)
        solved = solution.status not in (Status.INFEASIBLE, Status.UNKNOWN)
        found = _read(graph, run, solution.values) if solved else plain_order(graph)
    if simulate(graph, program_of(graph, found)).peak_bytes > budget_bytes:
        least = simulate(graph, program_of(graph, least_order(graph))).peak_bytes
        raise BudgetError(
            f"no program fits {format_bytes(budget_bytes)}; the least found needs {format_bytes(least)}",
            budget_bytes=budget_bytes,
            least_bytes=least,
        )
    return found


def _read(graph: StepGraph, run: dict[tuple[int, int], int], values: NDArray[np.float64]) -> list[int]:
    loss = graph.loss_index
    found = list(range(loss + 1))
    for stage in range(loss + 1, len(graph.ops)):
        found.extend(i for i in range(loss) if (stage, i) in run and values[run[stage, i]] > 0.5)
        found.append(stage)
    return found


def _formulate(graph: StepGraph, budget_bytes: int) -> tuple[Milp, dict[tuple[int, int], int]]:
    """Stages are the backward ops; the forward pass runs once, in order, before them."""
    loss, count = graph.loss_index, len(graph.ops)
    held, producer = graph.held_to_the_end(), graph.producers()
    optional = [s for s, info in enumerate(graph.storages) if info.kind is StorageKind.FORWARD and s not in held]
    scale = max(1.0, budget_bytes / 1000.0)
    problem = Milp()
    run: dict[tuple[int, int], int] = {}
    have: dict[tuple[int, int], int] = {}
    for stage in range(loss + 1, count):
        for i in range(loss):
            if graph.ops[i].recomputable:
                run[stage, i] = problem.variable(cost=graph.ops[i].seconds + 1e-12)
        for s in optional:
            have[stage, s] = problem.variable()
    have.update({(count, s): problem.variable(upper=0.0) for s in optional})
    for stage in range(loss + 1, count):
        reads = [(stage, s) for s in graph.ops[stage].reads]
        for _, s in reads:
            if (stage, s) in have:
                problem.row(_made(run, producer, stage, s) | {have[stage, s]: 1.0}, lower=1.0)
        for i in range(loss):
            if (stage, i) in run:
                for s in graph.ops[i].reads:
                    if (stage, s) in have:
                        terms = _made(run, producer, stage, s) | {have[stage, s]: 1.0}
                        terms[run[stage, i]] = terms.get(run[stage, i], 0.0) - 1.0
                        problem.row(terms, lower=0.0)
        for s in optional:
            terms = _made(run, producer, stage, s) | {have[stage, s]: 1.0, have[stage + 1, s]: -1.0}
            problem.row(terms, lower=0.0)
        _memory_rows(graph, problem, run, have, optional, producer, stage, budget_bytes, scale)
    _forward_rows(graph, problem, have, optional, budget_bytes, scale)
    return problem, run


def _made(run: dict[tuple[int, int], int], producer: list[int], stage: int, storage: int) -> dict[int, float]:
    variable = run.get((stage, producer[storage]))
    return {} if variable is None else {variable: 1.0}


def _memory_rows(
    graph: StepGraph,
    problem: Milp,
    run: dict[tuple[int, int], int],
    have: dict[tuple[int, int], int],
    optional: list[int],
    producer: list[int],
    stage: int,
    budget_bytes: int,
    scale: float,
) -> None:
    """Memory at every possible run of a stage: what came in or was made and is still needed."""
    loss = graph.loss_index
    moments = [i for i in range(loss) if (stage, i) in run] + [stage]
    for moment in moments:
        base = _others(graph, stage, running=moment == stage) + graph.ops[moment].workspace_bytes
        terms: dict[int, float] = {}
        for s in optional:
            alive = problem.variable(integer=False)
            made = [] if producer[s] > moment or (stage, producer[s]) not in run else [run[stage, producer[s]]]
            later = [run[stage, i] for i in moments if i >= moment and i != stage and s in graph.ops[i].reads]
            sure = s in graph.ops[stage].reads
            for source in [have[stage, s], *made]:
                if producer[s] == moment and source in made:
                    problem.row({alive: 1.0, source: -1.0}, lower=0.0)
                    continue
                if sure:
                    problem.row({alive: 1.0, source: -1.0}, lower=0.0)
                for need in [*later, have[stage + 1, s]]:
                    problem.row({alive: 1.0, source: -1.0, need: -1.0}, lower=-1.0)
            terms[alive] = graph.storages[s].nbytes / scale
        active = 0 if moment == stage else budget_bytes * 4
        upper = budget_bytes - base
        if moment != stage:
            # Only if the op runs at this moment.
            terms[run[stage, moment]] = active / scale
            upper += active
        problem.row(terms, upper=upper / scale)


def _others(graph: StepGraph, stage: int, *, running: bool) -> int:
    """Bytes at a stage that no choice changes: static, held, what backward ops made and still need.

    What the stage's own op makes counts only while it is `running`, not while ops run again for it.
    """
    held = graph.held_to_the_end()
    total = graph.static_bytes
    for s, info in enumerate(graph.storages):
        if info.kind is StorageKind.STATIC or (info.kind is StorageKind.FORWARD and s not in held):
            continue
        born = next((i for i, op in enumerate(graph.ops) if s in op.writes), None)
        if born is None or born > stage or (born == stage and not running):
            continue
        last = max([i for i, op in enumerate(graph.ops) if s in op.reads], default=born)
        if s in held or last >= stage:
            total += info.nbytes
    return total


def _forward_rows(
    graph: StepGraph,
    problem: Milp,
    have: dict[tuple[int, int], int],
    optional: list[int],
    budget_bytes: int,
    scale: float,
) -> None:
    """Memory of the forward pass and the loss: what is kept, and what later forward ops still read."""
    first = graph.loss_index + 1
    if first >= len(graph.ops):
        return
    for moment in range(first):
        op = graph.ops[moment]
        fixed = graph.static_bytes + op.workspace_bytes
        terms: dict[int, float] = {}
        for s, info in enumerate(graph.storages):
            born = next((i for i, o in enumerate(graph.ops) if s in o.writes), None)
            if born is None or born > moment:
                continue
            needed = born == moment or any(s in graph.ops[i].reads for i in range(moment, first))
            if s not in optional or needed:
                fixed += info.nbytes if s not in optional or needed else 0
            elif graph.ops[born].phase is Phase.FORWARD:
                terms[have[first, s]] = info.nbytes / scale
        problem.row(terms, upper=(budget_bytes - fixed) / scale)
