"""The simulator: computes the cost of a program. Planners propose, only this file judges.

It walks a program in integer bytes and returns the peak, the time and the bytes that are alive at each instant. The
memory model is that of a reference-counting allocator: a result exists from the moment its op starts, an operand until
the instruction after its last reader, a kernel's workspace only while it runs. In a fused region (`memfit.ir.fusion`),
storages that come in or go out are in memory from the first op to the last, and other results exist as slices.

Time has a lane for compute and one for each direction of a tier (`memfit.ir.tiers`); compute stalls where it waits for
a link. Memory does not depend on time: a program says when each storage is in memory.

Known limits: allocator fragmentation is not modelled here but corrected by the proving
run (`memfit.profiling.memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from memfit.ir.fusion import bytes_beside, fused_seconds
from memfit.ir.graph import Op, Phase, StepGraph
from memfit.ir.instructions import (
    Compute,
    Free,
    Instruction,
    SwapIn,
    SwapOut,
    TierResident,
    computes_in,
    freed_in,
    given_up,
)
from memfit.ir.program import Program, are_halves, as_they_run, whole_program
from memfit.ir.streaming import slices_moving, streaming_step, waited_seconds
from memfit.ir.tiers import Lanes, Tier

__all__ = ["Timeline", "live_storages_at", "simulate", "simulate_baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory, time and transfers of a simulated program.

    Attributes:
        peak_bytes: highest memory of the step, static bytes included.
        peak_position: instruction at which the peak is reached; the number of instructions if `optimizer.step()`
            reaches it.
        step_seconds: time of the step.
        plain_seconds: time of the step without memfit, for comparison.
        recompute_seconds: the part of `step_seconds` spent in ops that had run before.
        forward_end_bytes: memory held when the loss op starts, static bytes included.
        bytes_at: memory in use while each instruction runs, static bytes included.
        started_at: time at which compute reaches each instruction, in seconds.
        stalls: the part of the time that compute waits for swaps, by storage.
        transfer_seconds: time for which links are busy, added up over all links.
        out_bytes: bytes swapped out.
        in_bytes: bytes swapped in.
        tier_bytes: by tier, the most bytes it holds.
    """

    peak_bytes: int
    peak_position: int
    step_seconds: float
    plain_seconds: float
    recompute_seconds: float
    forward_end_bytes: int
    bytes_at: tuple[int, ...]
    started_at: tuple[float, ...]
    stalls: Mapping[int, float] = field(default_factory=dict)
    transfer_seconds: float = 0.0
    out_bytes: int = 0
    in_bytes: int = 0
    tier_bytes: Mapping[Tier, int] = field(default_factory=dict)

    @property
    def overhead(self) -> float:
        """Extra time over the step without memfit, as a fraction; below 0 where running in chunks is faster."""
        return self.step_seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0

    @property
    def stall_seconds(self) -> float:
        """The part of the time that compute waits for swaps."""
        return sum(self.stalls.values())

    @property
    def overlap(self) -> float:
        """The share of the links' time during which compute went on."""
        return 1 - self.stall_seconds / self.transfer_seconds if self.transfer_seconds else 1.0


def simulate(graph: StepGraph, program: Program, *, wait: bool = True) -> Timeline:
    """Walks the program; does not check it (see `check`).

    Args:
        graph: the step.
        program: a program of that step.
        wait: whether compute waits for swaps.

    Returns:
        Peak, time and the bytes in use at every instruction.
    """
    if tier_resident := program.tier_resident():
        graph = streaming_step(graph, tier_resident)
    walk = _begin(graph, program)
    for storage, tier in tier_resident.items():
        walk.lanes.tier_bytes[tier] = walk.lanes.tier_bytes.get(tier, 0) + graph.storages[storage].whole_bytes
    bytes_at: list[int] = []
    started_at: list[float] = []
    before: Instruction | None = None
    for run in program.runs():
        started_at += [walk.lanes.now] * len(run)
        if wait and (walk.leaving or walk.coming):
            _wait(walk, run)
        first = run[0]
        if not isinstance(first, Compute):
            _move(walk, first)
            bytes_at.append(walk.live)
        elif first.sliced:
            bytes_at += _run_slices(walk, run)
        else:
            bytes_at.append(_run_whole(walk, first, before))
        before = run[-1]
    peak_bytes = max(bytes_at, default=walk.live)
    peak_position = bytes_at.index(peak_bytes) if bytes_at else 0
    after = walk.live + graph.after_step_bytes
    if graph.after_step_bytes and after > peak_bytes:
        peak_bytes, peak_position = after, len(bytes_at)
    lanes = walk.lanes
    return Timeline(
        peak_bytes=peak_bytes,
        peak_position=peak_position,
        step_seconds=lanes.now + graph.after_step_seconds,
        plain_seconds=graph.plain_seconds,
        recompute_seconds=walk.recompute_seconds,
        forward_end_bytes=walk.forward_end_bytes,
        bytes_at=tuple(bytes_at),
        started_at=tuple(started_at),
        stalls=lanes.stalls,
        transfer_seconds=lanes.link_seconds,
        out_bytes=lanes.out_bytes,
        in_bytes=lanes.in_bytes,
        tier_bytes=dict(lanes.tier_bytes),
    )


@dataclass(slots=True, kw_only=True)
class _Walk:
    """The state of a step between two instructions.

    Attributes:
        graph: the step.
        sizes: bytes of each storage.
        last_run: for each op, the number of runs before its last run.
        lanes: the clocks.
        live: bytes in memory.
        forward_end_bytes: bytes in memory when the loss started.
        recompute_seconds: time of ops that had run before.
        runs: number of ops that ran, each time counted.
        ran: ops that ran.
        alive: storages in memory, static ones not included.
        leaving: storages on their way to a tier.
        coming: storages on their way back.
    """

    graph: StepGraph
    sizes: list[int]
    last_run: dict[int, int]
    lanes: Lanes
    live: int
    forward_end_bytes: int
    recompute_seconds: float = 0.0
    runs: int = 0
    ran: set[int] = field(default_factory=set)
    alive: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)


def _begin(graph: StepGraph, program: Program) -> _Walk:
    live = graph.static_bytes + (graph.buffer_bytes(program.swapped().values()) if graph.tiers else 0)
    return _Walk(
        graph=graph,
        sizes=[s.nbytes for s in graph.storages],
        last_run={op: n for n, op in enumerate(program.order())},
        lanes=Lanes(graph.tiers),
        live=live,
        forward_end_bytes=live,
    )


def _move(walk: _Walk, instruction: Free | SwapOut | SwapIn | TierResident) -> None:
    """Frees or moves a storage."""
    storage = instruction.storage
    if isinstance(instruction, Free):
        walk.live -= walk.sizes[storage]
        walk.alive.discard(storage)
    elif isinstance(instruction, SwapOut):
        walk.lanes.start_out(storage, walk.sizes[storage], instruction.tier)
        walk.leaving.add(storage)
    elif isinstance(instruction, SwapIn):
        walk.lanes.start_in(storage, walk.sizes[storage])
        walk.coming.add(storage)
        walk.alive.add(storage)
        walk.live += walk.sizes[storage]


def _run_whole(walk: _Walk, instruction: Compute, before: Instruction | None) -> int:
    """Runs an op whole or in chunks; returns the bytes in use meanwhile."""
    index, ops, sizes, alive = instruction.op, walk.graph.ops, walk.sizes, walk.alive
    again = index in walk.ran
    op = ops[index].later if again else ops[index]
    if op.phase is Phase.LOSS:
        walk.forward_end_bytes = walk.live
    created = thrown_away = 0
    for storage in op.writes:
        if storage in alive:
            thrown_away += sizes[storage]
        else:
            created += sizes[storage]
            alive.add(storage)
    is_last = walk.last_run[index] == walk.runs
    if op.random_state_bytes and not again and not is_last:
        walk.live += op.random_state_bytes
    if instruction.over is not None:
        created -= sizes[instruction.over]
        alive.discard(instruction.over)
    workspace_bytes = op.run_workspace_bytes(instruction.chunks)
    if op.half_of and isinstance(before, Compute) and are_halves(walk.graph, before, instruction):
        workspace_bytes = max(workspace_bytes, ops[before.op].run_workspace_bytes(before.chunks))
    # While an op is replayed from its saved generator state, the current generator state is put aside.
    put_aside = op.random_state_bytes if again else 0
    used = walk.live + created + thrown_away + workspace_bytes + put_aside
    walk.live += created
    took = op.run_seconds(instruction.chunks, in_place=instruction.over is not None)
    walk.lanes.now += took
    if again:
        walk.recompute_seconds += took
        if op.random_state_bytes and is_last:
            walk.live -= op.random_state_bytes
    walk.ran.add(index)
    walk.runs += 1
    return used


def _run_slices(walk: _Walk, run: Sequence[Instruction]) -> list[int]:
    """Runs a fused region slice by slice; returns the bytes in use at each of its instructions."""
    ops, sizes, ran = walk.graph.ops, walk.sizes, walk.ran
    computes = computes_in(run)
    together = [ops[i.op].later if i.op in ran else ops[i.op] for i in computes]
    walk.runs += len(together)
    passed_on = set(freed_in(run))
    walk.live += sum(sizes[s] for op in together for s in op.writes if s not in passed_on)
    walk.live -= sum(sizes[i.over] for i in computes if i.over is not None)
    used = [walk.live + nbytes for nbytes in _slices(walk.graph, run, together)]
    seconds = fused_seconds(together, passed_on, [i.over for i in computes])
    walk.lanes.now += sum(seconds)
    _stream(walk.graph, together, passed_on, walk.lanes, sum(seconds))
    walk.recompute_seconds += sum(took for i, took in zip(computes, seconds, strict=True) if i.op in ran)
    freed = passed_on | {i.over for i in computes}
    walk.alive.update(s for op in together for s in op.writes)
    walk.alive.difference_update(s for s in freed if s is not None)
    ran.update(i.op for i in computes)
    return used


def _wait(walk: _Walk, run: Sequence[Instruction]) -> None:
    """Makes compute wait until operands of a run are back, and storages that it frees or overwrites on their tier."""
    for instruction in run:
        gone = given_up(instruction)
        if isinstance(instruction, Compute):
            op = walk.graph.ops[instruction.op]
            for storage in walk.coming.intersection((op.later if instruction.op in walk.ran else op).reads):
                walk.lanes.wait_in(storage)
                walk.coming.discard(storage)
        if gone in walk.leaving:
            walk.lanes.wait_out(gone)
            walk.leaving.discard(gone)


def _stream(graph: StepGraph, ops: Sequence[Op], passed_on: Collection[int], lanes: Lanes, seconds: float) -> None:
    """Counts the bytes that fused ops move to tiers and back, slice by slice, and the extra time for moving them."""
    into, out = slices_moving(graph, ops, passed_on)
    taken, waited = waited_seconds(graph, into, out, seconds)
    lanes.now += taken + waited
    for storage in (*into, *out):
        stream = graph.storages[storage].stream
        assert stream is not None
        if storage in out:
            lanes.out_bytes += stream.nbytes
            lanes.link_seconds += stream.out_seconds
        else:
            lanes.in_bytes += stream.nbytes
            lanes.link_seconds += stream.into_seconds
        if waited:
            lanes.stalls[storage] = lanes.stalls.get(storage, 0.0) + waited / len(into + out)


def _slices(graph: StepGraph, run: Sequence[Instruction], ops: Sequence[Op]) -> list[int]:
    """Bytes of slices at each instruction of a fused region, on top of the results that stay."""
    freed: list[list[int]] = []
    for instruction in run:
        if isinstance(instruction, Compute):
            freed.append([])
        elif isinstance(instruction, Free):
            freed[-1].append(instruction.storage)
    return bytes_beside(graph, ops, freed)


def simulate_baseline(graph: StepGraph) -> Timeline:
    """Timeline of the step without memfit."""
    whole = graph.without_memfit()
    return simulate(whole, whole_program(whole))


def live_storages_at(graph: StepGraph, program: Program, position: int) -> list[int]:
    """Storages in memory while instruction `position` runs, its results included, largest first."""
    ops = iter(as_they_run(graph, program.order()))
    alive: set[int] = set()
    for here, instruction in enumerate(program.instructions[: position + 1]):
        if not isinstance(instruction, Compute):
            if isinstance(instruction, SwapIn):
                alive.add(instruction.storage)
            elif isinstance(instruction, Free) and here < position:
                alive.discard(instruction.storage)
            continue
        alive.update(next(ops).writes)
        if instruction.over is not None:
            alive.discard(instruction.over)
    return sorted(alive - program.tier_resident().keys(), key=lambda s: -graph.storages[s].nbytes)
