"""`milp`: the fastest program of a small step, proven.

Time is cut into stages, one for each op of the step; stage `t` ends with the first run of op `t`, and before it any
forward ops may be recomputed, each once and in their order. `run[t, i]` says that op `i` is recomputed in stage `t`. A
storage lives through a chain of events, the runs of the op that makes it and of those that read it, and a variable
after each event says whether a copy is there:

    a read needs a copy before it, and only a read may be the last event of the copy
    a write makes a copy, and there is none before it
    bytes before a run + results of the run + its workspace - bytes it overwrites  <=  budget

These are exactly the rules of `program_of` for an order and of `simulate` for a program, so the optimum is that of the
programs that run. Given the runs, all other variables are implied integers.

Source: Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization" (MLSys 2020), with
copies by storage instead of by op, freed by last read, in-place ops and generator states.

Known limits: the number of variables grows with the square of the ops, so large steps are refused. An op runs at most
once in a stage; schedules that need an op twice between two first runs are not considered.
"""

from __future__ import annotations

from collections import defaultdict

from memfit.errors import SpecError
from memfit.ir.graph import Op, Phase, StepGraph, StorageKind
from memfit.ir.program import baseline_order, program_of
from memfit.planner.analysis.no_plan import no_plan
from memfit.planner.solver import Milp, Solution, Status, solve
from memfit.sim.simulator import Timeline, simulate

__all__ = ["order"]

_MOST_OPS = 60
_SECONDS = 60.0

_Moment = tuple[int, int]
"""A stage and an op that runs in it."""


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """The order of the least time within the budget; the captured order without a budget.

    Raises:
        SpecError: if the step is too large.
        BudgetError: if no order fits, with the least budget that works.
    """
    plain = baseline_order(graph)
    if budget_bytes is None or _timeline(graph, plain).peak_bytes <= budget_bytes:
        return plain
    if len(graph.ops) > _MOST_OPS:
        raise SpecError(
            f"strategy 'milp' takes steps of at most {_MOST_OPS} ops (ops: {len(graph.ops)}); use 'rotor' or 'auto'"
        )
    room = budget_bytes
    while (found := _fastest(graph, room)) is not None:
        excess = _timeline(graph, found).peak_bytes - budget_bytes
        if excess <= 0:
            return found
        room -= excess  # a rounding error of the solver
    raise no_plan(
        *(graph, program_of(graph, _lowest(graph)), budget_bytes),
        subject="order of strategy 'milp'",
        advice="strategy 'auto', which also fuses ops, may go lower",
    )


def _timeline(graph: StepGraph, found: list[int]) -> Timeline:
    return simulate(graph, program_of(graph, found))


def _fastest(graph: StepGraph, room_bytes: int) -> list[int] | None:
    if graph.static_bytes + _after_step(graph) > room_bytes:
        return None
    scale = max(1.0, room_bytes / 1000)
    problem = Milp()
    run = _runs(graph, problem)
    for variable, (_, op) in zip(run.values(), run, strict=True):
        problem.cost[variable] = graph.ops[op].recompute_seconds
    for terms in _memory(graph, problem, run):
        row = {variable: nbytes / scale for variable, nbytes in terms.items() if variable >= 0}
        upper = (room_bytes - graph.static_bytes - terms.get(_ONE, 0)) / scale
        if row:
            problem.row(row, upper=upper)
        elif upper < 0:
            return None
    solution = solve(problem, seconds=_SECONDS, gap=0.0)
    return None if solution.status in (Status.INFEASIBLE, Status.UNKNOWN) else _read(graph, run, solution)


def _lowest(graph: StepGraph) -> list[int]:
    """The order of the least peak, regardless of its time."""
    problem = Milp()
    run = _runs(graph, problem)
    plain = baseline_order(graph)
    scale = max(1.0, _timeline(graph, plain).peak_bytes / 1000)
    peak = problem.variable(cost=1.0, lower=0.0, upper=1e4, integer=False)
    for terms in _memory(graph, problem, run):
        row = {variable: nbytes / scale for variable, nbytes in terms.items() if variable >= 0}
        problem.row(row | {peak: -1.0}, upper=-(graph.static_bytes + terms.get(_ONE, 0)) / scale)
    solution = solve(problem, seconds=_SECONDS, gap=0.0)
    found = plain if solution.status in (Status.INFEASIBLE, Status.UNKNOWN) else _read(graph, run, solution)
    return min(found, plain, key=lambda candidate: _timeline(graph, candidate).peak_bytes)


def _after_step(graph: StepGraph) -> int:
    held = graph.held_to_the_end()
    return graph.after_step_bytes + sum(graph.storages[s].nbytes for s in held if not graph.is_free(s))


def _read(graph: StepGraph, run: dict[_Moment, int], solution: Solution) -> list[int]:
    found: list[int] = []
    for stage in range(len(graph.ops)):
        found.extend(op for op in range(stage) if (stage, op) in run and solution.values[run[stage, op]] > 0.5)
        found.append(stage)
    return found


def _runs(graph: StepGraph, problem: Milp) -> dict[_Moment, int]:
    """A variable for every op that may be recomputed in a stage; for rules on subgraphs see `memfit.sim.verifier`."""
    run: dict[_Moment, int] = {}
    for stage in range(1, len(graph.ops)):
        before, coming = graph.ops[stage - 1], graph.ops[stage]
        for index, op in enumerate(graph.ops[:stage]):
            closed = before.phase is Phase.BACKWARD and op.subgraph > before.subgraph
            closed = closed or (coming.phase is Phase.BACKWARD and op.subgraph < coming.subgraph)
            if op.phase is Phase.FORWARD and op.recomputable and not closed:
                run[stage, index] = problem.variable()
    return run


_ONE = -1
"""In a sum over variables: the constant."""

_Terms = dict[int, int]


def _memory(graph: StepGraph, problem: Milp, run: dict[_Moment, int]) -> list[_Terms]:
    """Adds the lifetimes of all storages; returns the bytes in use at every moment, without static bytes."""
    moments = sorted([*run, *((stage, stage) for stage in range(len(graph.ops)))])
    bytes_at: dict[_Moment, _Terms] = {moment: defaultdict(int) for moment in moments}
    after: dict[tuple[_Moment, int], int] = {}
    held = graph.held_to_the_end()
    for storage, facts in enumerate(graph.storages):
        if facts.kind is not StorageKind.STATIC:
            _live(graph, problem, run, moments, storage, storage in held, bytes_at, after)
    for moment in moments:
        op, terms = _op_at(graph, moment), bytes_at[moment]
        variable = run.get(moment, _ONE)
        put_aside = op.random_state_bytes if moment in run else 0  # the generator's state while the op is replayed
        terms[variable] += op.workspace_bytes + put_aside + sum(graph.storages[s].nbytes for s in op.writes)
        over = next((s for s in op.in_place_over if s not in held and not graph.is_free(s)), None)
        if over is not None:
            overwritten = problem.variable(integer=False)
            problem.row({overwritten: 1.0, after[moment, over]: 1.0}, upper=1.0)
            _at_most(problem, overwritten, after.get((moment, op.writes[0]), _ONE))
            _at_most(problem, overwritten, variable)
            terms[overwritten] -= graph.storages[over].nbytes
    for index, op in enumerate(graph.ops):
        if op.random_state_bytes:
            _remember(problem, run, moments, index, op, bytes_at)
    return list(bytes_at.values())


def _op_at(graph: StepGraph, moment: _Moment) -> Op:
    stage, index = moment
    return graph.ops[index] if index == stage else graph.ops[index].later


def _at_most(problem: Milp, variable: int, limit: int) -> None:
    if limit != _ONE:
        problem.row({variable: 1.0, limit: -1.0}, upper=0.0)


def _live(
    graph: StepGraph,
    problem: Milp,
    run: dict[_Moment, int],
    moments: list[_Moment],
    storage: int,
    is_held: bool,
    bytes_at: dict[_Moment, _Terms],
    after: dict[tuple[_Moment, int], int],
) -> None:
    """Adds the lifetime of a storage: whether a copy is in memory before each moment, and after each event."""
    nbytes = graph.storages[storage].nbytes
    there: int | None = None  # no copy yet
    for moment in moments:
        op = _op_at(graph, moment)
        if there is not None:
            bytes_at[moment][there] += nbytes
        writes, reads = storage in op.writes, storage in op.reads
        if not (writes or reads):
            continue
        if is_held:
            there = _ONE if writes else there
            continue
        runs = run.get(moment, _ONE)
        now = problem.variable(integer=False)
        before = {} if there is None else {there: 1.0}
        if writes:
            _row(problem, before | {runs: before.get(runs, 0.0) + 1.0}, upper=1.0)
            _row(problem, {now: 1.0, runs: -1.0} | {v: -c for v, c in before.items()}, upper=0.0)
            _row(problem, {now: 1.0} | {v: -c for v, c in before.items()}, lower=0.0)
        else:
            _row(problem, {runs: 1.0} | {v: -c for v, c in before.items()}, upper=0.0)
            _row(problem, {now: 1.0} | {v: -c for v, c in before.items()}, upper=0.0)
            _row(problem, {now: 1.0, runs: 1.0} | {v: -c for v, c in before.items()}, lower=0.0)
        after[moment, storage] = there = now
    if there is not None and not is_held:
        problem.upper[there] = 0.0


def _row(problem: Milp, terms: dict[int, float], *, lower: float | None = None, upper: float | None = None) -> None:
    """Adds a row in which one term may be the constant 1."""
    constant = terms.pop(_ONE, 0.0)
    if upper is not None:
        problem.row(terms, upper=upper - constant)
    if lower is not None:
        problem.row(terms, lower=lower - constant)


def _remember(
    problem: Milp,
    run: dict[_Moment, int],
    moments: list[_Moment],
    index: int,
    op: Op,
    bytes_at: dict[_Moment, _Terms],
) -> None:
    """Adds the generator state of an op, which is held from the first run of the op to its last one."""
    later: int | None = None  # whether the op is recomputed at this moment or later, from the end backwards
    for moment in reversed(moments):
        if moment < (index, index):
            break
        if moment[1] == index and moment in run:
            again = problem.variable(integer=False)
            _at_most(problem, run[moment], again)
            if later is not None:
                _at_most(problem, later, again)
            later = again
        if later is not None:
            bytes_at[moment][later] += op.random_state_bytes
