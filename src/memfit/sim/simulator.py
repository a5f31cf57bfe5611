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
from memfit.ir.program import Action, Instruction, Program, are_halves, as_they_run, plain_program
from memfit.ir.streaming import slices_moving, streaming_step, waited_seconds
from memfit.ir.tiers import Lanes, Tier

__all__ = ["Timeline", "live_storages_at", "simulate", "simulate_plain"]


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
    ops, storages = graph.ops, graph.storages
    sizes = [s.nbytes for s in storages]
    last_run = {op: n for n, op in enumerate(program.order())}
    live = graph.static_bytes + (graph.buffer_bytes(program.swapped().values()) if graph.tiers else 0)
    alive: set[int] = set()
    ran: set[int] = set()
    runs = 0
    recompute_seconds = 0.0
    lanes = Lanes(graph.tiers)
    for storage, tier in tier_resident.items():
        lanes.tier_bytes[tier] = lanes.tier_bytes.get(tier, 0) + storages[storage].whole_bytes
    leaving: set[int] = set()
    coming: set[int] = set()
    forward_end_bytes = live
    bytes_at: list[int] = []
    started_at: list[float] = []
    before: Instruction | None = None
    for run in program.runs():
        started_at += [lanes.now] * len(run)
        if wait and (leaving or coming):
            _wait(graph, run, ran, lanes, leaving, coming)
        ahead, before = before, run[-1]
        if run[0].sliced:
            computes = [i for i in run if i.action is Action.COMPUTE]
            together = [ops[i.index].later if i.index in ran else ops[i.index] for i in computes]
            runs += len(together)
            passed_on = {i.index for i in run if i.action is Action.FREE}
            live += sum(sizes[s] for op in together for s in op.writes if s not in passed_on)
            live -= sum(sizes[i.over] for i in computes if i.over is not None)
            bytes_at += [live + nbytes for nbytes in _slices(graph, run, together)]
            seconds = fused_seconds(together, passed_on, [i.over for i in computes])
            lanes.now += sum(seconds)
            _stream(graph, together, passed_on, lanes, sum(seconds))
            recompute_seconds += sum(took for i, took in zip(computes, seconds, strict=True) if i.index in ran)
            freed = passed_on | {i.over for i in run}
            alive.update(s for op in together for s in op.writes)
            alive.difference_update(s for s in freed if s is not None)
            ran.update(i.index for i in computes)
            continue
        (instruction,) = run
        if instruction.action is Action.STREAM:
            bytes_at.append(live)
            continue
        if instruction.action is Action.FREE:
            live -= sizes[instruction.index]
            alive.discard(instruction.index)
            bytes_at.append(live)
            continue
        if instruction.action is Action.SWAP_OUT:
            assert instruction.tier is not None
            lanes.start_out(instruction.index, sizes[instruction.index], instruction.tier)
            leaving.add(instruction.index)
            bytes_at.append(live)
            continue
        if instruction.action is Action.SWAP_IN:
            lanes.start_in(instruction.index, sizes[instruction.index])
            coming.add(instruction.index)
            alive.add(instruction.index)
            live += sizes[instruction.index]
            bytes_at.append(live)
            continue
        index = instruction.index
        op = ops[index].later if index in ran else ops[index]
        if op.phase is Phase.LOSS:
            forward_end_bytes = live
        created = thrown_away = 0
        for storage in op.writes:
            if storage in alive:
                thrown_away += sizes[storage]
            else:
                created += sizes[storage]
                alive.add(storage)
        if op.random_state_bytes and index not in ran and last_run[index] != runs:
            live += op.random_state_bytes
        if instruction.over is not None:
            created -= sizes[instruction.over]
            alive.discard(instruction.over)
        workspace_bytes = op.run_workspace_bytes(instruction.chunks)
        if op.half_of and ahead is not None and are_halves(graph, ahead, instruction):
            workspace_bytes = max(workspace_bytes, ops[ahead.index].run_workspace_bytes(ahead.chunks))
        # While an op is replayed from its saved generator state, the current generator state is put aside.
        put_aside = op.random_state_bytes if index in ran else 0
        bytes_at.append(live + created + thrown_away + workspace_bytes + put_aside)
        live += created
        took = op.run_seconds(instruction.chunks, in_place=instruction.over is not None)
        lanes.now += took
        if index in ran:
            recompute_seconds += took
            if op.random_state_bytes and last_run[index] == runs:
                live -= op.random_state_bytes
        ran.add(index)
        runs += 1
    peak_bytes = max(bytes_at, default=live)
    peak_position = bytes_at.index(peak_bytes) if bytes_at else 0
    after = live + graph.after_step_bytes
    if graph.after_step_bytes and after > peak_bytes:
        peak_bytes, peak_position = after, len(bytes_at)
    return Timeline(
        peak_bytes=peak_bytes,
        peak_position=peak_position,
        step_seconds=lanes.now + graph.after_step_seconds,
        plain_seconds=graph.plain_seconds,
        recompute_seconds=recompute_seconds,
        forward_end_bytes=forward_end_bytes,
        bytes_at=tuple(bytes_at),
        started_at=tuple(started_at),
        stalls=lanes.stalls,
        transfer_seconds=lanes.link_seconds,
        out_bytes=lanes.out_bytes,
        in_bytes=lanes.in_bytes,
        tier_bytes=dict(lanes.tier_bytes),
    )


def _wait(
    graph: StepGraph,
    run: Sequence[Instruction],
    ran: Collection[int],
    lanes: Lanes,
    leaving: set[int],
    coming: set[int],
) -> None:
    """Makes compute wait until operands of a run are back, and storages that it frees or overwrites on their tier."""
    for instruction in run:
        gone = instruction.over
        if instruction.action is Action.FREE:
            gone = instruction.index
        elif instruction.action is Action.COMPUTE:
            op = graph.ops[instruction.index]
            for storage in coming.intersection((op.later if instruction.index in ran else op).reads):
                lanes.wait_in(storage)
                coming.discard(storage)
        if gone in leaving:
            lanes.wait_out(gone)
            leaving.discard(gone)


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
        if instruction.action is Action.COMPUTE:
            freed.append([])
        else:
            freed[-1].append(instruction.index)
    return bytes_beside(graph, ops, freed)


def simulate_plain(graph: StepGraph) -> Timeline:
    """Timeline of the step without memfit."""
    return simulate(graph.without_memfit(), plain_program(graph))


def live_storages_at(graph: StepGraph, program: Program, position: int) -> list[int]:
    """Storages in memory while instruction `position` runs, its results included, largest first."""
    ops = iter(as_they_run(graph, program.order()))
    alive: set[int] = set()
    for here, instruction in enumerate(program.instructions[: position + 1]):
        if instruction.action is not Action.COMPUTE:
            if instruction.action is Action.SWAP_IN:
                alive.add(instruction.index)
            elif instruction.action is Action.FREE and here < position:
                alive.discard(instruction.index)
            continue
        alive.update(next(ops).writes)
        if instruction.over is not None:
            alive.discard(instruction.over)
    return sorted(alive - program.tier_resident().keys(), key=lambda s: -graph.storages[s].nbytes)
