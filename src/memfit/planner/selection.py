"""What to keep so that every instant of the backward pass fits, each op running again at most once.

The relaxed bound (`memfit.planner.bound`) knows one instant, the loss. Its solution often drops a chain of
cheap storages across many blocks, and running that chain again fills the memory in the middle of the backward
pass. Here the instants that overflow are added one round after another. At instant `t`, for an op `o`, a
variable says whether `o` has run again by then:

    ran[o, t] >= 1 - keep[s]              if backward reads a result s of o at or before t
    ran[p, t] >= ran[o, t] - keep[s]      if o reads s and p makes s
    sum of sizes of s still to be read, times (keep[s] + ran[maker of s, t])  <=  room at t

Each round solves, orders (`memfit.planner.lazy`), simulates, and tightens the room at the instants where the
model was too hopeful. Idea: cutting planes over Checkmate's formulation (Jain et al., MLSys 2020) with lazy
use-site rematerialisation, which needs one time index only where memory binds.

Known limits: storages are never dropped and made a third time; `memfit.planner.rotor` and
`memfit.planner.polish` do that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.planner.lazy import lazy_order
from memfit.planner.solver import Milp, Status, solve
from memfit.step.graph import Phase, StepGraph, StorageKind
from memfit.step.program import Action, Program, program_of
from memfit.step.simulate import simulate

__all__ = ["Candidate", "keep_by_instants"]

_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An order with its peak and its extra time, from the simulator."""

    order: tuple[int, ...]
    peak_bytes: int
    recompute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """When the backward pass can need forward results; times are op indices, -1 for never.

    Attributes:
        first_read: by storage, first backward op that reads it.
        last_read: by storage, last backward op that reads it.
        until: by storage, last instant at which it can still be of use.
        latest: by op, the latest instant at which it may first have to run again.
        earliest: by op, the earliest such instant.
    """

    first_read: NDArray[np.int64]
    last_read: NDArray[np.int64]
    until: NDArray[np.int64]
    latest: NDArray[np.int64]
    earliest: NDArray[np.int64]


def keep_by_instants(
    graph: StepGraph, budget_bytes: int, *, rounds: int = 12, seconds: float = 2.0
) -> list[Candidate]:
    """Finds what to keep under a budget.

    Args:
        graph: the step.
        budget_bytes: peak of the whole step.
        rounds: how often to solve.
        seconds: time limit of each solve.

    Returns:
        A candidate of every round; the last ones fit best, those that fit cost least.
    """
    needs = _needs(graph)
    base = _backward_base(graph)
    room: dict[int, float] = {graph.loss_index: float(budget_bytes)}
    candidates: list[Candidate] = []
    for _ in range(rounds):
        kept = _solve(graph, needs, base, room, seconds)
        if kept is None:
            break
        order = lazy_order(graph, kept)
        program = program_of(graph, order)
        timeline = simulate(graph, program)
        candidates.append(
            Candidate(
                order=tuple(order), peak_bytes=timeline.peak_bytes, recompute_seconds=timeline.recompute_seconds
            )
        )
        if timeline.peak_bytes <= budget_bytes:
            break
        if not _tighten(graph, needs, base, program, timeline.bytes_at, kept, order, budget_bytes, room):
            break
    return candidates


def _needs(graph: StepGraph) -> _Needs:
    count, ops = len(graph.storages), len(graph.ops)
    first = np.full(count, -1)
    last = np.full(count, -1)
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD:
            for s in op.reads:
                first[s] = index if first[s] < 0 else first[s]
                last[s] = index
    readers: list[list[int]] = [[] for _ in range(count)]
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD:
            for s in op.reads:
                readers[s].append(index)
    latest = np.full(ops, -1)
    earliest = np.full(ops, -1)
    until = last.copy()
    for index in reversed(range(graph.loss_index)):
        op = graph.ops[index]
        direct = [int(first[s]) for s in op.writes if first[s] >= 0]
        users = {u for s in op.writes for u in readers[s] if latest[u] >= 0}
        for s in op.writes:
            until[s] = max([int(last[s]), *(int(latest[u]) for u in readers[s])])
        if direct:
            latest[index] = min(direct)
        elif users:
            latest[index] = max(int(latest[u]) for u in users)
        moments = direct + [int(earliest[u]) for u in users]
        if moments:
            earliest[index] = min(moments)
    return _Needs(first_read=first, last_read=last, until=until, latest=latest, earliest=earliest)


def _backward_base(graph: StepGraph) -> NDArray[np.int64]:
    """By op, memory of everything but forward results while it runs: static, held, gradients, workspace."""
    only_backward = set(
        i
        for i, s in enumerate(graph.storages)
        if s.kind in (StorageKind.BACKWARD, StorageKind.GRADIENT, StorageKind.TANGENT)
    ) | set(graph.outputs)
    program = program_of(graph, range(len(graph.ops)))
    base = np.zeros(len(graph.ops), dtype=np.int64)
    sizes = [s.nbytes for s in graph.storages]
    live = graph.static_bytes
    for instruction in program.instructions:
        index = instruction.index
        if instruction.action is Action.FREE:
            live -= sizes[index] if index in only_backward else 0
            continue
        op = graph.ops[index]
        new = sum(sizes[s] for s in op.writes if s in only_backward)
        if instruction.in_place and op.in_place_over in only_backward:
            new -= sizes[op.in_place_over]
        base[index] = live + new + op.workspace_bytes
        live += new
    return base


def _solve(
    graph: StepGraph, needs: _Needs, base: NDArray[np.int64], room: dict[int, float], seconds: float
) -> frozenset[int] | None:
    producer = graph.producers()
    held = graph.held_to_the_end()
    problem = Milp()
    optional = [
        s
        for s, storage in enumerate(graph.storages)
        if storage.kind is StorageKind.FORWARD and s not in held and needs.until[s] >= 0
    ]
    keep = {s: problem.variable(lower=0.0 if graph.ops[producer[s]].recomputable else 1.0) for s in optional}
    rerun = {
        o: problem.variable(cost=op.seconds, integer=False)
        for o, op in enumerate(graph.ops)
        if op.phase is Phase.FORWARD and op.recomputable and needs.latest[o] >= 0
    }

    def maker(storage: int, ran: dict[int, int]) -> dict[int, float]:
        variable = ran.get(producer[storage])
        return {} if variable is None else {variable: 1.0}

    for storage, variable in keep.items():
        if needs.first_read[storage] >= 0:
            problem.row({variable: 1.0, **maker(storage, rerun)}, lower=1.0)
    for op, variable in rerun.items():
        for operand in graph.ops[op].reads:
            if operand in keep:
                problem.row({keep[operand]: 1.0, **maker(operand, rerun), variable: -1.0}, lower=0.0)
    for instant, room_bytes in room.items():
        ran = _ran_by(graph, needs, problem, keep, rerun, instant)
        memory: dict[int, float] = {}
        for storage, variable in keep.items():
            if needs.until[storage] >= instant:
                size = graph.storages[storage].nbytes / _MIB
                memory[variable] = memory.get(variable, 0.0) + size
                again = ran.get(producer[storage])
                if again is not None:
                    memory[again] = memory.get(again, 0.0) + size
        problem.row(memory, upper=(room_bytes - float(base[instant])) / _MIB)
    solution = solve(problem, seconds=seconds, gap=1e-3)
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        return None
    return frozenset(s for s, variable in keep.items() if solution.values[variable] > 0.5)


def _ran_by(
    graph: StepGraph, needs: _Needs, problem: Milp, keep: dict[int, int], rerun: dict[int, int], instant: int
) -> dict[int, int]:
    """Variables for `op has run again by the instant`; ops that cannot have are left out."""
    ran: dict[int, int] = {}
    if instant == graph.loss_index:
        return ran
    for op, variable in rerun.items():
        if needs.earliest[op] <= instant:
            ran[op] = variable if needs.latest[op] <= instant else problem.variable(integer=False)
    for op, variable in ran.items():
        if needs.latest[op] > instant:
            for storage in graph.ops[op].writes:
                if storage in keep and 0 <= needs.first_read[storage] <= instant:
                    problem.row({variable: 1.0, keep[storage]: 1.0}, lower=1.0)
    producer = graph.producers()
    for op, variable in ran.items():
        for operand in graph.ops[op].reads:
            other = ran.get(producer[operand])
            if operand in keep and other is not None and needs.latest[producer[operand]] > instant:
                problem.row({other: 1.0, keep[operand]: 1.0, variable: -1.0}, lower=0.0)
    return ran


def _tighten(
    graph: StepGraph,
    needs: _Needs,
    base: NDArray[np.int64],
    program: Program,
    bytes_at: tuple[int, ...],
    kept: frozenset[int],
    order: list[int],
    budget_bytes: int,
    room: dict[int, float],
) -> bool:
    """Adds the instants that overflow, and less room where the model was too hopeful; False if nothing new."""
    peaks = _peak_by_backward_op(graph, program, bytes_at)
    over = {t: p for t, p in peaks.items() if p > budget_bytes}
    changed = False
    for instant in _local_maxima(over):
        excess = over[instant] - budget_bytes
        if instant not in room:
            room[instant] = float(budget_bytes)
            changed = True
            modelled = _modelled(graph, needs, base, kept, order, instant)
            room[instant] -= max(0, over[instant] - modelled)
        else:
            room[instant] -= excess
            changed = True
    return changed


def _modelled(
    graph: StepGraph, needs: _Needs, base: NDArray[np.int64], kept: frozenset[int], order: list[int], instant: int
) -> int:
    """What the memory row of an instant says of a selection."""
    total = int(base[instant])
    alive = {s for s in kept if needs.until[s] >= instant}
    if instant > graph.loss_index:
        for index in order[graph.loss_index + 1 : order.index(instant)]:
            op = graph.ops[index]
            if op.phase is Phase.FORWARD:
                alive.update(s for s in op.writes if needs.until[s] >= instant)
    held = graph.held_to_the_end()
    return total + sum(graph.storages[s].nbytes for s in alive if s not in held)


def _peak_by_backward_op(graph: StepGraph, program: Program, bytes_at: tuple[int, ...]) -> dict[int, int]:
    """Highest memory while a backward op and the recomputation before it run."""
    peaks: dict[int, int] = {}
    waiting = 0
    past_loss = False
    for instruction, nbytes in zip(program.instructions, bytes_at, strict=True):
        if instruction.action is Action.FREE:
            continue
        op = graph.ops[instruction.index]
        if op.phase is Phase.FORWARD and not past_loss:
            continue
        past_loss = True
        waiting = max(waiting, nbytes)
        if op.phase is not Phase.FORWARD:
            peaks[instruction.index] = waiting
            waiting = 0
    return peaks


def _local_maxima(over: dict[int, int], *, most: int = 24) -> list[int]:
    """Instants higher than their neighbours, highest first."""
    instants = sorted(over)
    peaks = [
        t
        for i, t in enumerate(instants)
        if over[t] >= max(over.get(t - 1, 0), over.get(t + 1, 0))
        and (i == 0 or over[t] != over[instants[i - 1]] or instants[i - 1] != t - 1)
    ]
    return sorted(peaks, key=lambda t: -over[t])[:most]
