"""Schedules transfers of swaps: early enough that compute does not wait, where there is room.

A planner's order says where a swapped storage is needed again. `ahead_of_use` moves the transfer back ahead by the time
that its link needs, as far as there is room until then. Transfers of one direction follow each other, so they are
scheduled from the last to the first: each has to be done when it is needed and before the next one begins.

`with_transfers` turns the order into instructions. The transfer out starts as soon as a storage is made; its memory is
given up when the transfer is done, or earlier where memory is short, and then compute waits.

Source: prefetching as in vDNN (Rhu et al., 2016) and Large Model Support (Le et al., 2018), with measured links and
simulated memory in place of fixed distances.

Known limits: a storage that is swapped out stays on its tier until the step ends; times are those of the program
without stalls.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.ir.graph import Op, Phase, StepGraph
from memfit.ir.instructions import Compute, Free, Instruction, SwapIn, SwapOut, computes_in
from memfit.ir.program import Program, as_they_run, program_of
from memfit.ir.tiers import Link, Tier
from memfit.planner.offload.model import SWAP_IN
from memfit.sim.simulator import simulate

__all__ = ["ahead_of_use", "with_transfers"]

_AHEAD = 1.25
"""Factor by which the time given to a transfer back is longer than the time that its link needs."""


def ahead_of_use(swapping: StepGraph, order: Sequence[int], into: Mapping[int, Link], limit_bytes: int) -> list[int]:
    """Moves ops that stand for transfers back ahead.

    Args:
        swapping: the step with swaps in place of second runs (`memfit.planner.offload.model`), ops in their leanest
            variants; a transfer that is in time for the quickest variants is in time for any variant that will run.
        order: an order of its ops.
        into: by storage, the link of its transfer back.
        limit_bytes: for the peak.

    Returns:
        An order of the same runs, within the limit if the given order is.
    """
    program = program_of(swapping, order)
    computing = [n for n, i in enumerate(program.instructions) if isinstance(i, Compute)]
    room = limit_bytes - np.array(simulate(swapping, program).bytes_at, dtype=np.int64)[computing]
    started = [0.0, *itertools.accumulate(map(_quickest_seconds, as_they_run(swapping, order)))]
    begins = _begin_runs(program)
    moved: dict[int, list[int]] = {}
    gone: set[int] = set()
    lane: dict[Link, float] = {}
    for back in reversed(_returns(swapping, order)):
        op = swapping.ops[order[back.place]].later
        nbytes = sum(swapping.storages[s].nbytes for s in op.writes)
        link = into[op.writes[0]]
        wanted = min(started[back.needed], lane.get(link, float("inf"))) - _AHEAD * link.seconds(nbytes)
        place = back.place
        while place > back.earliest and started[place] > wanted and room[place - 1] >= nbytes:
            place -= 1
        while place < back.place and not begins[place]:
            place += 1
        lane[link] = min(wanted, started[place])
        if place < back.place:
            room[place : back.place] -= nbytes
            moved.setdefault(place, []).append(order[back.place])
            gone.add(back.place)
    found: list[int] = []
    for place, index in enumerate(order):
        found.extend(reversed(moved.get(place, [])))
        if place not in gone:
            found.append(index)
    return found


def _quickest_seconds(op: Op) -> float:
    """Time of an op in its quickest variant."""
    in_place = (op.seconds if op.in_place_seconds is None else op.in_place_seconds,)
    return min(op.seconds, *in_place, *(variant.seconds for variant in op.variants))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """A transfer back: its place, the place of its first reader, and the first place it may move to."""

    place: int
    needed: int
    earliest: int


def _returns(swapping: StepGraph, order: Sequence[int]) -> list[_Return]:
    """The transfers back, in their order."""
    found: list[_Return] = []
    last_use: dict[int, int] = {}
    waiting: dict[int, tuple[int, int]] = {}  # storages on their way back: place, first place it may move to
    last_of_subgraph: dict[int, int] = {}
    loss = 0
    ops = as_they_run(swapping, order)
    for place, op in enumerate(ops):
        loss = place if op.phase is Phase.LOSS else loss
        for storage in op.reads:
            at, earliest = waiting.pop(storage, (-1, 0))
            if at >= 0:
                for other in ops[at].writes:
                    waiting.pop(other, None)
                found.append(_Return(place=at, needed=place, earliest=earliest))
            last_use[storage] = place
        if op.target == SWAP_IN:
            elsewhere = (at for subgraph, at in last_of_subgraph.items() if subgraph != op.subgraph)
            after = max([loss, *elsewhere, *(last_use.get(s, 0) for s in op.writes)])
            waiting.update((s, (place, after + 1)) for s in op.writes)
        last_use.update((s, place) for s in op.writes)
        if op.phase is not Phase.LOSS:
            last_of_subgraph[op.subgraph] = place
    return sorted(found, key=lambda back: back.place)


def with_transfers(
    graph: StepGraph, swapping: StepGraph, program: Program, tier_of: Mapping[int, Tier], limit_bytes: int
) -> Program:
    """Turns second runs that stand for swaps into transfers.

    Args:
        graph: the step.
        swapping: the same step with swaps in place of second runs.
        program: a program of `swapping`.
        tier_of: the tier of each swapped storage.
        limit_bytes: for the peak.

    Returns:
        A program of `graph`, within the limit if the given program is.
    """
    moving = _as_transfers(swapping, program, tier_of)
    return _freed_late(graph, moving, limit_bytes) if moving.swapped() else moving


def _as_transfers(swapping: StepGraph, program: Program, tier_of: Mapping[int, Tier]) -> Program:
    """The program with transfers: out right after a storage is made, and back in place of its recomputation."""
    ran: set[int] = set()
    back: set[int] = set()
    made: list[Instruction | None] = []
    waiting: dict[int, int] = {}  # storages that came back and were not read yet, and where they came back
    for instruction in program.instructions:
        if isinstance(instruction, Free) and instruction.storage in waiting:
            made[waiting.pop(instruction.storage)] = None  # came back with another result of its op, nobody reads it
            continue
        if isinstance(instruction, Compute):
            first, is_first = swapping.ops[instruction.op], instruction.op not in ran
            if not is_first and first.later.target == SWAP_IN:
                for storage in first.later.writes:
                    waiting[storage] = len(made)
                    made.append(SwapIn(storage))
                continue
            touched = waiting.keys() & {*(first if is_first else first.later).reads, instruction.over}
            back |= touched
            for storage in touched:
                del waiting[storage]
            ran.add(instruction.op)
        made.append(instruction)
    found: list[Instruction] = []
    out: set[int] = set()
    for instruction in (i for i in made if i is not None):
        found.append(instruction)
        if isinstance(instruction, Compute):
            for storage in swapping.ops[instruction.op].writes:
                if storage in back and storage not in out:
                    out.add(storage)
                    found.append(SwapOut(storage, tier_of[storage]))
    return Program(instructions=tuple(found))


def _freed_late(graph: StepGraph, program: Program, limit_bytes: int) -> Program:
    """The program with storages on their way out freed when they have arrived, or where there is no room to wait."""
    timeline = simulate(graph, program, wait=False)
    out = {links.tier: links.out for links in graph.tiers}
    sizes = [s.nbytes for s in graph.storages]
    subgraph = {s: op.subgraph for op in graph.ops for s in op.writes}
    last_subgraph = max(op.subgraph for op in graph.ops)
    lane_free: dict[Tier, float] = {}
    arrives: dict[int, float] = {}
    pending: dict[int, float] = {}
    here_subgraph = graph.ops[0].subgraph
    late = 0.0  # time that compute has waited so far
    found: list[Instruction] = []

    def give_up(storage: int) -> None:
        nonlocal late
        late += max(0.0, pending.pop(storage) - now)
        found.append(Free(storage))

    position = 0
    for run in program.runs():
        here = range(position, position + len(run))
        position += len(run)
        now = timeline.started_at[here.start] + late
        instruction = run[0]
        for storage in [s for s, ready in pending.items() if ready <= now]:
            give_up(storage)
        needed = max(timeline.bytes_at[p] for p in here)
        for op in (graph.ops[i.op] for i in computes_in(run)):
            here_subgraph = last_subgraph if op.phase is Phase.LOSS else op.subgraph
        for storage in sorted(pending, key=pending.__getitem__):
            # A subgraph cannot give up a storage while other subgraphs run, only before them or long after.
            if subgraph[storage] != here_subgraph:
                give_up(storage)
            elif needed + sum(sizes[s] for s in pending) > limit_bytes or storage in _written(graph, run):
                give_up(storage)
        if isinstance(instruction, Free) and instruction.storage in arrives:
            pending[instruction.storage] = arrives.pop(instruction.storage)
            continue
        if isinstance(instruction, SwapOut) and instruction.tier in out:
            start = max(lane_free.get(instruction.tier, 0.0), now)
            lane_free[instruction.tier] = start + out[instruction.tier].seconds(sizes[instruction.storage])
            arrives[instruction.storage] = lane_free[instruction.tier]
        found.extend(run)
    for storage in list(pending):
        give_up(storage)
    return Program(instructions=tuple(found))


def _written(graph: StepGraph, run: Sequence[Instruction]) -> set[int]:
    """Storages that a run brings into memory."""
    found: set[int] = set()
    for instruction in run:
        if isinstance(instruction, Compute):
            found.update(graph.ops[instruction.op].writes)
        elif isinstance(instruction, SwapIn):
            found.add(instruction.storage)
    return found


def _begin_runs(program: Program) -> list[bool]:
    """For each op of a program's order whether it begins a fused region."""
    found: list[bool] = []
    for run in program.runs():
        found += [place == 0 for place in range(len(computes_in(run)))]
    return found
