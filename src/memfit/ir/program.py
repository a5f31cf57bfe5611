"""The program: the exact order in which a step computes and frees.

A planner decides an order of ops in which forward ops may appear again (recomputation); `program_of` turns the order
into instructions: it frees every storage right after its last read and overwrites an operand in place where the operand
dies. The runtime executes exactly this, since generated code drops each value after its last use, so a program
describes the real execution.

Known limits: at most one copy of a storage is alive, the one written last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct, structs

from memfit.ir.fusion import Fusion, fusions, overwritten, runs_by_slices
from memfit.ir.graph import Op, Phase, StepGraph
from memfit.ir.instructions import Compute, Free, Instruction, SwapOut, TierResident
from memfit.ir.streaming import streams
from memfit.ir.tiers import Tier

__all__ = [
    "Program",
    "as_they_run",
    "assembled",
    "dying_after",
    "in_their_subgraphs",
    "baseline_order",
    "program_of",
    "whole_program",
    "are_recomputed",
]


class Program(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The instructions of one step, forward to backward."""

    instructions: Annotated[tuple[Instruction, ...], Meta(max_length=10_000_000)]

    def order(self) -> list[int]:
        """The ops in the order they run, recomputed ones repeated."""
        return [i.op for i in self.instructions if isinstance(i, Compute)]

    def runs(self) -> Iterator[tuple[Instruction, ...]]:
        """The instructions of each fused region; an instruction that is not fused is a run of its own."""
        start = 0
        for position, instruction in enumerate(self.instructions):
            if not instruction.fused:
                yield self.instructions[start : position + 1]
                start = position + 1

    def swapped(self) -> dict[int, Tier]:
        """Storages that are swapped out, with their tiers, in the order in which they leave."""
        return {i.storage: i.tier for i in self.instructions if isinstance(i, SwapOut)}

    def tier_resident(self) -> dict[int, Tier]:
        """Tier-resident storages, with their tiers."""
        return {i.storage: i.tier for i in self.instructions if isinstance(i, TierResident)}

    def tiers(self) -> list[Tier]:
        """The tiers that the program uses, in the order of their first use."""
        return list(dict.fromkeys(i.tier for i in self.instructions if isinstance(i, SwapOut | TierResident)))

    def recomputed(self) -> list[int]:
        """Recomputed ops, one entry for every extra run, in order."""
        seen: set[int] = set()
        again: list[int] = []
        for op in self.order():
            if op in seen:
                again.append(op)
            seen.add(op)
        return again


def are_halves(graph: StepGraph, first: Instruction, second: Instruction) -> bool:
    """Whether two adjacent instructions run in one call: halves of it, both whole and not over another storage."""
    if not isinstance(first, Compute) or not isinstance(second, Compute):
        return False
    if any(i.chunks > 1 or i.sliced or i.over is not None for i in (first, second)):
        return False
    ahead, here = graph.ops[first.op], graph.ops[second.op]
    return (
        bool(here.half_of)
        and (ahead.half_of, ahead.subgraph) == (here.half_of, here.subgraph)
        and first.op != second.op
    )


def baseline_order(graph: StepGraph) -> list[int]:
    """Every op once, as captured."""
    return list(range(len(graph.ops)))


def whole_program(graph: StepGraph) -> Program:
    """Every op once, whole and in new memory: of a step without memfit, the step as eager autograd runs it."""
    whole = structs.replace(graph, ops=tuple(op.whole() for op in graph.ops))
    return program_of(whole, baseline_order(whole))


def as_they_run(graph: StepGraph, order: Sequence[int]) -> list[Op]:
    """The ops of an order in the form in which they run: recomputed ops as `Op.later`."""
    ran: set[int] = set()
    ops: list[Op] = []
    for index in order:
        ops.append(graph.ops[index].later if index in ran else graph.ops[index])
        ran.add(index)
    return ops


def are_recomputed(order: Sequence[int]) -> list[bool]:
    """For each position whether its op ran before."""
    first = dict(zip(reversed(order), reversed(range(len(order))), strict=True))
    return [first[index] < position for position, index in enumerate(order)]


def in_their_subgraphs(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """The order in which recomputations wait until the backward pass reaches their subgraph, and then run at once.

    A subgraph runs only its own ops, so they cannot run earlier.
    """
    found: list[int] = []
    waiting: list[int] = []
    running = max(op.subgraph for op in graph.ops)
    past_loss = False
    for index in order:
        op = graph.ops[index]
        if past_loss and op.phase is Phase.FORWARD and op.subgraph < running:
            waiting.append(index)
            continue
        if op.phase is Phase.BACKWARD and op.subgraph < running:
            running = op.subgraph
            found += [i for i in waiting if graph.ops[i].subgraph >= running]
            waiting = [i for i in waiting if graph.ops[i].subgraph < running]
        past_loss = past_loss or op.phase is Phase.LOSS
        found.append(index)
    return found


def program_of(graph: StepGraph, order: Sequence[int], *, in_place: bool = True, fuse: bool = True) -> Program:
    """Adds frees and in-place marks to an order of ops.

    Every read uses the copy written last; a copy is freed right after its last read, or at once if nothing reads it.
    Storages that the caller holds (outputs, gradients) are never freed and never written twice.

    Args:
        graph: the step; each op runs in its `chunks`.
        order: op indices; forward ops may repeat, before or after the loss op.
        in_place: overwrite operands that die where the op allows it.
        fuse: whether ops are fused where that takes less memory.

    Returns:
        The program.
    """
    ops = as_they_run(graph, order)
    dying = dying_after(graph, ops)
    runs = fusions(graph, runs_by_slices(graph, ops, are_recomputed(order), dying)) if fuse else []

    def alone(position: int) -> list[Instruction]:
        dead = dying[position]
        op = ops[position]
        over = overwritten(op, dead) if in_place else None
        frees = [Free(s) for s in dead if s != over]
        return [Compute(order[position], op.chunks, over, sliced=streams(graph, op)), *frees]

    return assembled(order, ops, dying, runs, alone)


def assembled(
    order: Sequence[int],
    ops: Sequence[Op],
    dying: Sequence[Sequence[int]],
    runs: Sequence[Fusion],
    alone: Callable[[int], Iterable[Instruction]],
) -> Program:
    """A program of fused regions and of other ops.

    Args:
        order: op indices.
        ops: as they run.
        dying: storages that die after each op (`dying_after`).
        runs: the fused regions.
        alone: the instructions of the op at a position that runs by itself.

    Returns:
        The program.
    """
    fused_at = {run.start: run for run in runs}
    instructions: list[Instruction] = []
    position = 0
    while position < len(order):
        run = fused_at.get(position)
        instructions += alone(position) if run is None else _as_one(run, order, ops, dying)
        position = position + 1 if run is None else run.stop
    return Program(instructions=tuple(instructions))


def dying_after(graph: StepGraph, ops: Sequence[Op]) -> list[list[int]]:
    """For each position the storages with a copy that is used there for the last time."""
    held = graph.held_to_the_end()
    written_at: dict[int, int] = {}
    last_read: dict[tuple[int, int], int] = {}
    for position, op in enumerate(ops):
        for storage in op.reads:
            if storage in written_at:
                last_read[storage, written_at[storage]] = position
        for storage in op.writes:
            if storage not in held:
                written_at[storage] = position
                last_read[storage, position] = position
    dying: list[list[int]] = [[] for _ in ops]
    for (storage, _), position in last_read.items():
        if storage not in held:
            dying[position].append(storage)
    return dying


def _as_one(run: Fusion, order: Sequence[int], ops: Sequence[Op], dying: Sequence[Sequence[int]]) -> list[Instruction]:
    """Fused ops with frees of storages that exist as slices only; whole storages are freed after the ops."""
    written: set[int] = set()
    fused: list[Compute | Free] = []
    after: list[Free] = []
    taken = set(run.over.values())
    for position in range(run.start, run.stop):
        op = ops[position]
        assert op.by_slices is not None
        written.update(op.writes)
        fused.append(Compute(order[position], op.by_slices.slices, run.over.get(position), sliced=True, fused=True))
        for storage in dying[position]:
            if storage in written and storage not in op.by_slices.sums:
                fused.append(Free(storage, fused=True))
            elif storage not in taken:
                after.append(Free(storage))
    fused[-1] = structs.replace(fused[-1], fused=False)
    return [*fused, *after]
