"""The executable specification of a program. The result of every planner passes through it.

A program is right when it computes the results of the step. Each op runs at least once and in an order in which every
operand is alive; only recomputable forward ops run more than once, and each gradient is computed exactly once. Only
storages that are alive are freed, and at the end only storages that the caller holds are left. Each op runs in a number
of chunks that is known to give the same bits. Fused ops pass on only slices of the same samples. Storages that are
swapped out come back after their memory was given up, tier-resident storages are touched slice by slice, and no tier
holds more than its limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from memfit.errors import ProgramError
from memfit.ir.graph import Op, Phase, StepGraph, StorageKind
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
from memfit.ir.program import Program
from memfit.ir.streaming import streamable, tier_bytes
from memfit.ir.tiers import Tier, slot_bytes

__all__ = ["check"]

_VERBS = {Free: "frees", SwapOut: "swaps out", SwapIn: "swaps in", TierResident: "keeps on a tier"}


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run of the program, as far as it has been checked.

    Attributes:
        graph: the step.
        held: storages that the caller holds at the end.
        static: storages that exist before the step.
        tier_resident: storages that live on tiers.
        alive: storages that are in memory now.
        ran: ops that have run.
        recomputed: forward ops that have run after the loss.
        past_loss: whether the loss has run.
        last_drawn: the last op that drew random numbers, -1 before the first.
        subgraph: the subgraph that the backward pass has reached, -1 before it.
    """

    graph: StepGraph
    held: frozenset[int]
    static: frozenset[int]
    tier_resident: Set[int]
    alive: set[int] = field(default_factory=set)
    ran: set[int] = field(default_factory=set)
    recomputed: list[int] = field(default_factory=list)
    past_loss: bool = False
    last_drawn: int = -1
    subgraph: int = -1


def check(graph: StepGraph, program: Program) -> None:
    """Checks a program against its step.

    Args:
        graph: the step.
        program: the program to check.

    Raises:
        ProgramError: naming the instruction and the rule it breaks.
    """
    sliced = _check_sliced(graph, program)
    _check_swaps(graph, program)
    run = _Run(
        graph=graph,
        held=graph.held_to_the_end(),
        static=frozenset(i for i, s in enumerate(graph.storages) if s.kind is StorageKind.STATIC),
        tier_resident=_check_streams(graph, program),
    )
    for position, instruction in enumerate(program.instructions):
        where = f"instruction {position}"
        if isinstance(instruction, Compute):
            _check_compute(run, instruction, where, sliced=position in sliced)
        else:
            _check_storage(run, instruction, where)
    missing = [op.name for i, op in enumerate(graph.ops) if i not in run.ran]
    if missing:
        raise ProgramError(f"{len(missing)} ops never run, the first is {missing[0]}")
    left = run.alive - run.held
    if left:
        raise ProgramError(f"{len(left)} storages are never freed, the first is {graph.storages[min(left)].name}")


def _check_storage(run: _Run, instruction: Free | SwapOut | SwapIn | TierResident, where: str) -> None:
    """Checks an instruction that frees or moves a storage."""
    index, storages = instruction.storage, run.graph.storages
    verb = _VERBS[type(instruction)]
    if not 0 <= index < len(storages):
        raise ProgramError(f"{where} {verb} storage {index}, but the step has {len(storages)} storages")
    name = storages[index].name
    if isinstance(instruction, SwapIn):
        if index in run.alive:
            raise ProgramError(f"{where} {verb} {name}, which is still alive")
        run.alive.add(index)
    elif not isinstance(instruction, TierResident) and index not in run.alive:
        raise ProgramError(f"{where} {verb} {name}, which is not alive")
    if isinstance(instruction, Free):
        if index in run.held:
            raise ProgramError(f"{where} frees {name}, which belongs to the caller")
        run.alive.discard(index)


def _check_compute(run: _Run, instruction: Compute, where: str, *, sliced: bool) -> None:
    """Checks an instruction that runs an op."""
    graph, index = run.graph, instruction.op
    if not 0 <= index < len(graph.ops):
        raise ProgramError(f"{where} runs op {index}, but the step has {len(graph.ops)} ops")
    op = graph.ops[index].later if index in run.ran else graph.ops[index]
    if not sliced:
        _check_whole(run, op, instruction, where)
    for storage in op.reads:
        if storage not in run.static and storage not in run.alive:
            raise ProgramError(f"{where}: {op.name} reads {graph.storages[storage].name}, which is not alive")
    _check_repetition(run, op, index, where)
    if op.phase is Phase.BACKWARD:
        _check_backward(run, op, where)
    run.past_loss = run.past_loss or op.phase is Phase.LOSS
    if run.past_loss and op.phase is Phase.FORWARD:
        if -1 < run.subgraph < op.subgraph:
            raise ProgramError(
                f"{where}: {op.name} of subgraph {op.subgraph} is recomputed after the backward pass "
                f"reached subgraph {run.subgraph}"
            )
        run.recomputed.append(index)
    if instruction.over is not None:
        _check_in_place(run, op, instruction, where, sliced=sliced)
        run.alive.discard(instruction.over)
    for storage in op.writes:
        if storage in run.alive and storage not in run.held:
            raise ProgramError(f"{where}: {op.name} writes {graph.storages[storage].name}, which is still alive")
        run.alive.add(storage)
    run.ran.add(index)


def _check_whole(run: _Run, op: Op, instruction: Compute, where: str) -> None:
    """Checks an op that runs whole or in chunks, not slice by slice."""
    if not run.tier_resident.isdisjoint((*op.reads, *op.writes)):
        raise ProgramError(f"{where}: {op.name} runs whole, but not all it touches is in memory")
    if instruction.chunks not in {op.chunks, *(variant.chunks for variant in op.variants)}:
        raise ProgramError(f"{where}: {op.name} cannot run in {instruction.chunks} chunks with the same bits")


def _check_repetition(run: _Run, op: Op, index: int, where: str) -> None:
    """Checks that an op may run now: for the first time, or once more; notes that it drew random numbers."""
    again, is_forward = index in run.ran, op.phase is Phase.FORWARD
    if is_forward and again and not op.recomputable:
        raise ProgramError(f"{where}: {op.name} is recomputed, but doing so is not exact")
    if op.random_state_bytes and not again:
        if index < run.last_drawn:
            earlier = run.graph.ops[run.last_drawn].name
            raise ProgramError(f"{where}: {op.name} draws other numbers, since it runs after {earlier}")
        run.last_drawn = index
    if not is_forward and again:
        raise ProgramError(f"{where}: {op.phase} op {op.name} runs twice")
    if is_forward and run.past_loss and not again:
        raise ProgramError(f"{where}: {op.name} runs for the first time after the loss")


def _check_backward(run: _Run, op: Op, where: str) -> None:
    """Checks that the backward pass may reach the subgraph of an op, and notes that it has."""
    if not run.past_loss:
        raise ProgramError(f"{where}: backward op {op.name} runs before the loss")
    run.subgraph = op.subgraph
    for early in (run.graph.ops[i] for i in run.recomputed if run.graph.ops[i].subgraph < op.subgraph):
        raise ProgramError(
            f"{where}: {early.name} of subgraph {early.subgraph} ran again before the backward pass of "
            f"subgraph {op.subgraph} ended"
        )


def _check_in_place(run: _Run, op: Op, instruction: Compute, where: str, *, sliced: bool) -> None:
    """Checks an op that writes over an operand, or slice by slice over a dead storage."""
    over, storages = instruction.over, run.graph.storages
    assert over is not None
    if sliced:
        if over not in run.alive or not run.tier_resident.isdisjoint((over, op.writes[0])):
            raise ProgramError(f"{where}: {op.name} runs over {storages[over].name}, which is not in memory")
        return
    if op.variants and instruction.chunks == 1:
        raise ProgramError(f"{where}: {op.name} cannot run in place as a whole")
    if over not in op.in_place_over or over in run.held or over in run.static or over not in run.alive:
        raise ProgramError(f"{where}: {op.name} cannot run in place")
    if storages[over].nbytes != storages[op.writes[0]].nbytes:
        raise ProgramError(f"{where}: {op.name} overwrites a storage of another size")


def _check_swaps(graph: StepGraph, program: Program) -> None:
    """Checks the storages that are swapped out and swapped in."""
    held = graph.held_to_the_end()
    out: dict[int, Tier] = {}
    back: set[int] = set()
    for position, instruction in enumerate(program.instructions):
        if not isinstance(instruction, SwapOut | SwapIn) or not 0 <= instruction.storage < len(graph.storages):
            continue
        index, where = instruction.storage, f"instruction {position}"
        name = graph.storages[index].name
        if isinstance(instruction, SwapIn):
            if index not in out:
                raise ProgramError(f"{where} swaps in {name}, which is on no tier")
            back.add(index)
            continue
        if graph.storages[index].kind is not StorageKind.FORWARD or index in held:
            raise ProgramError(f"{where} swaps out {name}, which is no forward result of the step's own")
        if index in out:
            raise ProgramError(f"{where} swaps out {name} twice")
        out[index] = instruction.tier
    _check_given_up(graph, program)
    for index in out:
        if index not in back:
            raise ProgramError(f"{graph.storages[index].name} is swapped out and never comes back")


def _check_streams(graph: StepGraph, program: Program) -> set[int]:
    """Checks the tier-resident storages, and the bytes that tiers hold.

    Returns:
        The tier-resident storages.
    """
    found: set[int] = set()
    swapped = program.swapped()
    streaming = True
    for position, instruction in enumerate(program.instructions):
        if not isinstance(instruction, TierResident):
            streaming = False
            continue
        index, where = instruction.storage, f"instruction {position}"
        if not 0 <= index < len(graph.storages):
            raise ProgramError(
                f"{where} keeps storage {index} on a tier, but the step has {len(graph.storages)} storages"
            )
        name = graph.storages[index].name
        if not streaming or index in found or index in swapped:
            raise ProgramError(f"{where} has {name} live on a tier too late, twice, or though it is swapped")
        found.add(index)
    if found and swapped:
        raise ProgramError("some storages live on tiers and others are moved there whole, which no program mixes")
    for index in found.difference(streamable(graph, least_bytes=0)):
        raise ProgramError(f"{graph.storages[index].name} lives on a tier, but not all ops touch slices of it")
    for links in graph.tiers:
        nbytes = sum(tier_bytes(graph, s) for s, tier in program.tier_resident().items() if tier is links.tier)
        nbytes += sum(slot_bytes(graph.storages[s].nbytes) for s, tier in swapped.items() if tier is links.tier)
        if links.limit_bytes is not None and nbytes > links.limit_bytes:
            raise ProgramError(f"{nbytes} bytes are swapped to {links.tier}, which may hold {links.limit_bytes}")
    return found


def _check_given_up(graph: StepGraph, program: Program) -> None:
    """Checks that no storage on its way out is given up after the loss but before its subgraph's backward pass."""
    subgraph = {s: op.subgraph for op in graph.ops for s in op.writes}
    reached: int | None = None  # the subgraph that the backward pass has reached
    leaving: set[int] = set()
    for position, instruction in enumerate(program.instructions):
        gone = given_up(instruction)
        if isinstance(instruction, SwapOut):
            leaving.add(instruction.storage)
        elif gone in leaving:
            assert gone is not None
            leaving.discard(gone)
            if reached is not None and subgraph[gone] < reached:
                name = graph.storages[gone].name
                raise ProgramError(f"instruction {position} gives {name} up before the backward pass of its subgraph")
        if isinstance(instruction, Compute) and 0 <= instruction.op < len(graph.ops):
            op = graph.ops[instruction.op]
            if op.phase is Phase.LOSS:
                reached = max(op.subgraph for op in graph.ops)
            elif op.phase is Phase.BACKWARD:
                reached = op.subgraph


def _check_sliced(graph: StepGraph, program: Program) -> set[int]:
    """Checks the rules that hold only for ops that run slice by slice, alone or fused.

    Returns:
        Positions of their instructions.
    """
    sliced: set[int] = set()
    ran: set[int] = set()
    subgraph_of = {s: op.subgraph for op in graph.ops for s in op.writes}
    start = 0
    for run in program.runs():
        where = f"instruction {start}"
        computes = [i.op for i in computes_in(run)]
        if len(run) > 1 or (isinstance(run[0], Compute) and run[0].sliced):
            if any(not isinstance(i, Compute | Free) for i in run):
                raise ProgramError(f"{where} fuses ops, and swaps in between")
            if any(not 0 <= i < len(graph.ops) for i in computes):
                raise ProgramError(f"{where} fuses ops, but the step has {len(graph.ops)} ops")
            if len(set(computes)) < len(computes):
                raise ProgramError(f"{where} fuses an op with itself")
            _check_slices(graph, run, ran, subgraph_of, where)
            sliced.update(range(start, start + len(run)))
        ran.update(computes)
        start += len(run)
    if start < len(program.instructions):
        raise ProgramError("the last instruction is fused with the next, but there is none")
    return sliced


def _check_slices(
    graph: StepGraph, run: Sequence[Instruction], ran: Collection[int], subgraph_of: Mapping[int, int], where: str
) -> None:
    held = graph.held_to_the_end()

    def runs(index: int) -> Op:
        return graph.ops[index].later if index in ran else graph.ops[index]

    ops = [runs(i.op) for i in computes_in(run)]
    if len({(op.by_slices and op.by_slices.cut, op.subgraph) for op in ops}) > 1:
        raise ProgramError(f"{where}: ops are fused, but not of the same samples of the same subgraph")
    in_tiles = any(op.by_slices is not None and op.by_slices.grid for op in ops)
    taken = {s for op in ops for s in op.reads} if in_tiles else set[int]()
    whole = {s for op in ops for s in _read_whole(op)}
    written: set[int] = set()
    sums = {s for op in ops if op.by_slices for s in op.by_slices.sums}
    freed = set(freed_in(run))
    for instruction in run:
        if isinstance(instruction, Free) and instruction.storage not in written:
            raise ProgramError(f"{where}: what comes in is freed before the last samples are done")
        if not isinstance(instruction, Compute):
            continue
        op, again = runs(instruction.op), instruction.op in ran
        if op.by_slices is None or instruction.chunks != op.by_slices.slices or not instruction.sliced:
            raise ProgramError(f"{where}: {op.name} cannot run in {instruction.chunks} slices")
        if not again and not op.by_slices.first:
            raise ProgramError(f"{where}: only where it ran before can {op.name} run slice by slice")
        too_early = written.intersection(sums).intersection(op.reads) or written.intersection(_read_whole(op))
        if too_early or (again and not held.isdisjoint(op.writes)):
            raise ProgramError(f"{where}: {op.name} cannot run slice by slice here")
        written.update(op.writes)
        over = instruction.over
        if over is None:
            continue
        ours = op.writes[0] not in freed and op.writes[0] not in op.by_slices.sums
        elsewhere = subgraph_of.get(over) != op.subgraph
        if over in whole or over in taken or over in written or over in held or not ours or elsewhere:
            raise ProgramError(f"{where}: {op.name} cannot run in place slice by slice")
        if not graph.storages[over].reusable:
            raise ProgramError(f"{where}: {op.name} cannot run over {graph.storages[over].name}")
        if graph.storages[over].nbytes != graph.storages[op.writes[0]].nbytes:
            raise ProgramError(f"{where}: {op.name} overwrites a storage of another size")


def _read_whole(op: Op) -> list[int]:
    return [s for s in op.reads if op.by_slices is None or s not in op.by_slices.reads]
