"""Choice of the storages to save, and until when, so that every instant of the backward pass fits.

The first guess (`memfit.planner.bounds.relaxation`) limits memory at one instant only, the loss. It often drops a chain
of cheap storages across many blocks, and recomputing that chain fills the memory in the middle of the backward pass.
Here the backward pass is divided into **epochs**. At the start of an epoch each storage is in memory or not, and an op
is recomputed at most once in each epoch, right before the first use of its results:

    keep[s, e] + rerun[o, e] >= 1                  if backward reads s, made by o, in epoch e
    keep[s, e] + rerun[p, e] >= rerun[o, e]        if o reads s, made by p
    keep[s, e + 1] <= keep[s, e] + rerun[o, e]     a storage is carried over or it is dropped

Memory is constrained at the instants where it overflows; each round adds such instants. At instant `t` of epoch `e` a
variable says whether an op has been recomputed by then:

    ran[o, t] >= 1 - keep[s, e]                    if backward reads s, made by o, in e up to t
    ran[p, t] >= ran[o, t] - keep[s, e]            if o reads s, made by p
    sum of sizes of storages alive at t  <=  room at t

Each round solves the model, makes an order and simulates it. Then it reduces the room of the instants at which the
model underestimated the memory.

Idea: Checkmate's formulation (Jain et al., MLSys 2020) with lazy use-site rematerialisation, coarse time and
cutting planes, which leaves thousands of variables where Checkmate has millions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.instructions import Compute, Free
from memfit.ir.program import Program, program_of
from memfit.planner.analysis.demand import Needs, epoch_starts, needs_of
from memfit.planner.effort import Effort
from memfit.planner.search.lazy_recompute import lazy_order
from memfit.planner.solver import Milp, Status, solve
from memfit.sim.simulator import simulate

__all__ = ["Candidate", "select_over_time"]

_MIB = float(1 << 20)
_TINY = 2e-5
"""Storages below this share of the budget are always saved: they decide nothing and would add variables."""


_NEAR = 1.005
"""A peak up to this multiple of the budget is left to the polish, which lowers it at less cost than another round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An order with its peak and its extra time, from the simulator."""

    order: tuple[int, ...]
    peak_bytes: int
    recompute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The mixed-integer program under construction; `keep` and `rerun` are indexed by (storage or op, epoch)."""

    problem: Milp
    keep: dict[tuple[int, int], int]
    rerun: dict[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constraints:
    """The constraints that every selection satisfies.

    Attributes:
        starts: the first op of each epoch.
        needs: the storages that each epoch needs.
        base: for each instant, the bytes that every selection takes.
        room: the bytes that may be alive at an instant, for the instants that are constrained so far.
    """

    starts: Sequence[int]
    needs: Sequence[Needs]
    base: NDArray[np.int64]
    room: dict[int, float]


def select_over_time(
    graph: StepGraph,
    budget_bytes: int,
    *,
    epochs: int = 1,
    forced: Collection[int] = (),
    rounds: int = 16,
    seconds: float = 2.0,
    gap: float = 2e-3,
    effort: Effort | None = None,
) -> Iterator[Candidate]:
    """Selects the storages to save under a budget.

    Args:
        graph: the step.
        budget_bytes: peak of the whole step.
        epochs: number of epochs into which the backward pass is divided.
        forced: storages to save through the loss at any cost.
        rounds: largest number of solves.
        seconds: limit of each solve in nominal seconds.
        gap: relative gap at which a solve stops.
        effort: counts the work.

    Yields:
        One candidate per round; later candidates fit better.
    """
    starts = epoch_starts(graph, epochs)
    needs = [needs_of(graph, start, end) for start, end in zip(starts, [*starts[1:], len(graph.ops)], strict=True)]
    effort = effort or Effort()
    room = {graph.loss_index: float(budget_bytes)}
    constraints = _Constraints(starts=starts, needs=needs, base=_backward_base(graph), room=room)
    for _ in range(rounds):
        saved = _solve(graph, constraints, budget_bytes, forced, seconds, gap, effort)
        if saved is None:
            break
        order = lazy_order(graph, saved[0], dict(zip(starts[1:], saved[1:], strict=True)))
        effort.charge_ops(2 * len(order))
        program = program_of(graph, order)
        timeline = simulate(graph, program)
        yield Candidate(
            order=tuple(order), peak_bytes=timeline.peak_bytes, recompute_seconds=timeline.recompute_seconds
        )
        if timeline.peak_bytes <= budget_bytes * _NEAR:
            break
        _tighten(graph, constraints, program, timeline.bytes_at, budget_bytes)


def _solve(
    graph: StepGraph,
    constraints: _Constraints,
    budget_bytes: int,
    forced: Collection[int],
    seconds: float,
    gap: float,
    effort: Effort,
) -> list[frozenset[int]] | None:
    starts, needs = constraints.starts, constraints.needs
    model = _Model(problem=Milp(), keep={}, rerun={})
    producer = graph.producers()
    held = graph.held_to_the_end()
    always: set[int] = set()
    dominated = _dominated(graph)
    lasting = graph.lasting()
    for epoch, need in enumerate(needs):
        later = needs[epoch:]
        for storage, info in enumerate(graph.storages):
            if info.kind is not StorageKind.FORWARD or storage in held:
                continue
            if max(int(n.until[storage]) for n in later) < 0:
                continue
            recomputable = graph.ops[producer[storage]].recomputable and storage not in lasting
            if info.nbytes < _TINY * budget_bytes or not recomputable:
                always.add(storage)
                continue
            model.keep[storage, epoch] = model.problem.variable(
                integer=storage not in dominated,
                lower=1.0 if storage in forced and epoch == 0 else 0.0,
                upper=0.0 if storage in dominated and storage not in forced else 1.0,
            )
        for index, op in enumerate(graph.ops):
            if op.phase is Phase.FORWARD and op.recomputable and need.latest[index] >= 0:
                if any((s, epoch) in model.keep for s in op.writes):
                    model.rerun[index, epoch] = model.problem.variable(cost=op.recompute_seconds, integer=False)
    for epoch, need in enumerate(needs):
        _add_epoch(graph, model, producer, epoch, need)
    fixed = sum(graph.storages[s].nbytes for s in always)
    for instant, room_bytes in constraints.room.items():
        epoch = max(e for e, start in enumerate(starts) if start <= instant or e == 0)
        terms = _memory_row(graph, model, producer, epoch, needs[epoch], instant, graph.loss_index)
        model.problem.row(terms, upper=(room_bytes - float(constraints.base[instant]) - fixed) / _MIB)
    solution = solve(model.problem, seconds=seconds, gap=gap, dive=len(constraints.room) > 1, effort=effort)
    if solution.status in (Status.INFEASIBLE, Status.UNKNOWN):
        return None
    chosen: list[set[int]] = [set(always) for _ in needs]
    for (storage, epoch), variable in model.keep.items():
        if solution.values[variable] > 0.5:
            chosen[epoch].add(storage)
    return [frozenset(c) for c in chosen]


def _add_epoch(graph: StepGraph, model: _Model, producer: list[int], epoch: int, need: Needs) -> None:
    problem, keep, rerun = model.problem, model.keep, model.rerun
    for (storage, e), variable in keep.items():
        if e != epoch:
            continue
        again = rerun.get((producer[storage], epoch))
        if need.first_read[storage] >= 0:
            problem.row({variable: 1.0, **({} if again is None else {again: 1.0})}, lower=1.0)
        following = keep.get((storage, epoch + 1))
        if following is not None:
            problem.row({following: -1.0, variable: 1.0, **({} if again is None else {again: 1.0})}, lower=0.0)
    for (index, e), variable in rerun.items():
        if e != epoch:
            continue
        for operand in graph.ops[index].reads:
            if (operand, epoch) in keep:
                again = rerun.get((producer[operand], epoch))
                terms = {keep[operand, epoch]: 1.0, variable: -1.0}
                if again is not None:
                    terms[again] = terms.get(again, 0.0) + 1.0
                problem.row(terms, lower=0.0)


def _memory_row(
    graph: StepGraph, model: _Model, producer: list[int], epoch: int, need: Needs, instant: int, loss: int
) -> dict[int, float]:
    """Terms of the memory alive at an instant, in MiB; adds the variables and rows that these terms need."""
    problem, keep = model.problem, model.keep
    ran: dict[int, int] = {}
    if instant != loss:
        ran = _ran_by(graph, model, producer, epoch, need, instant)
    terms: dict[int, float] = {}
    for (storage, e), variable in keep.items():
        if e != epoch:
            continue
        size = graph.storages[storage].nbytes / _MIB
        if instant == loss:
            terms[variable] = terms.get(variable, 0.0) + size
            continue
        again = ran.get(producer[storage])
        carried = keep.get((storage, epoch + 1))
        if need.until[storage] >= instant:
            terms[variable] = terms.get(variable, 0.0) + size
            if again is not None:
                terms[again] = terms.get(again, 0.0) + size
        elif carried is not None:
            # No longer needed in this epoch, but in a later one: alive if it is in memory and carried over.
            alive = problem.variable(integer=False)
            problem.row({alive: 1.0, variable: -1.0, carried: -1.0}, lower=-1.0)
            if again is not None:
                problem.row({alive: 1.0, again: -1.0, carried: -1.0}, lower=-1.0)
            terms[alive] = terms.get(alive, 0.0) + size
    return terms


def _ran_by(
    graph: StepGraph, model: _Model, producer: list[int], epoch: int, need: Needs, instant: int
) -> dict[int, int]:
    """Variables for `op has been recomputed in this epoch by the instant`; ops that cannot have been are left out."""
    problem, keep = model.problem, model.keep
    ran: dict[int, int] = {}
    for (index, e), variable in model.rerun.items():
        if e == epoch and need.earliest[index] <= instant:
            ran[index] = variable if need.latest[index] <= instant else problem.variable(integer=False)
    for index, variable in ran.items():
        if need.latest[index] > instant:
            for storage in graph.ops[index].writes:
                if (storage, epoch) in keep and 0 <= need.first_read[storage] <= instant:
                    problem.row({variable: 1.0, keep[storage, epoch]: 1.0}, lower=1.0)
        for operand in graph.ops[index].reads:
            other = ran.get(producer[operand])
            if other is not None and (operand, epoch) in keep and need.latest[producer[operand]] > instant:
                problem.row({other: 1.0, keep[operand, epoch]: 1.0, variable: -1.0}, lower=0.0)
    return ran


def _dominated(graph: StepGraph) -> set[int]:
    """Storages never worth saving: their only reader makes results, together not larger, that can be saved instead."""
    readers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for storage in op.reads:
            readers.setdefault(storage, []).append(index)
    found: set[int] = set()
    for storage, users in readers.items():
        user = graph.ops[users[0]]
        if len(users) == 1 and user.phase is Phase.FORWARD and user.recomputable:
            made = sum(graph.storages[s].nbytes for s in user.writes)
            if made <= graph.storages[storage].nbytes and graph.storages[storage].kind is StorageKind.FORWARD:
                found.add(storage)
    return found


def _backward_base(graph: StepGraph) -> NDArray[np.int64]:
    """Memory while each op runs, without forward results: static bytes, held storages, gradients, workspace."""
    kinds = (StorageKind.BACKWARD, StorageKind.GRADIENT, StorageKind.TANGENT)
    counted = {i for i, s in enumerate(graph.storages) if s.kind in kinds} | set(graph.outputs)
    program = program_of(graph, range(len(graph.ops)))
    base = np.zeros(len(graph.ops), dtype=np.int64)
    sizes = [s.nbytes for s in graph.storages]
    live = graph.static_bytes
    for instruction in program.instructions:
        if isinstance(instruction, Free):
            live -= sizes[instruction.storage] if instruction.storage in counted else 0
        if not isinstance(instruction, Compute):
            continue
        op = graph.ops[instruction.op]
        new = sum(sizes[s] for s in op.writes if s in counted)
        if instruction.over in counted:
            new -= sizes[instruction.over]
        base[instruction.op] = live + new + op.workspace_bytes
        live += new
    return base


def _tighten(
    graph: StepGraph, constraints: _Constraints, program: Program, bytes_at: tuple[int, ...], budget_bytes: int
) -> None:
    """Adds the instants that overflow, and reduces the room of those that overflow although they are constrained."""
    room = constraints.room
    peaks = _peak_by_backward_op(graph, program, bytes_at)
    over = {t: p for t, p in peaks.items() if p > budget_bytes}
    for instant in _local_maxima(over):
        if instant not in room:
            room[instant] = float(budget_bytes)
        else:
            room[instant] -= (over[instant] - budget_bytes) / 2
    # The room of an instant cannot be less than the memory that every selection takes at it.
    for instant, room_bytes in room.items():
        room[instant] = max(room_bytes, float(constraints.base[instant]))


def _peak_by_backward_op(graph: StepGraph, program: Program, bytes_at: tuple[int, ...]) -> dict[int, int]:
    """Highest memory while a backward op and the recomputation before it run."""
    peaks: dict[int, int] = {}
    waiting = 0
    past_loss = False
    for instruction, nbytes in zip(program.instructions, bytes_at, strict=True):
        if not isinstance(instruction, Compute):
            continue
        op = graph.ops[instruction.op]
        if op.phase is Phase.FORWARD and not past_loss:
            continue
        past_loss = True
        waiting = max(waiting, nbytes)
        if op.phase is not Phase.FORWARD:
            peaks[instruction.op] = waiting
            waiting = 0
    return peaks


def _local_maxima(over: dict[int, int], *, most: int = 6) -> list[int]:
    """Instants at least as high as their neighbours, highest first."""
    peaks = [t for t in over if over[t] >= over.get(t - 1, 0) and over[t] > over.get(t + 1, 0)]
    return sorted(peaks, key=lambda t: -over[t])[:most]
