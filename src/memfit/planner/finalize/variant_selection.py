"""Variant selection: whether each op of a program runs whole or in chunks.

An op that runs in chunks takes less memory and sometimes more time (`memfit.ops.chunking`). Workspace exists only while
its op runs, so the choice is free for every run: orders are planned with every op in its leanest variant, then each run
gets the quickest variant for which there is room at its place. The same holds for ops that can be fused
(`memfit.ir.fusion`): orders are planned with them fused where fusing takes less memory, then they are fused where
fusing is quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from memfit.ir.fusion import Fusion, Run, fuse, fusions, linked, runs_by_slices
from memfit.ir.graph import Op, StepGraph, Variant
from memfit.ir.instructions import Compute, Free, Instruction
from memfit.ir.program import Program, are_recomputed, as_they_run, assembled, dying_after, program_of
from memfit.planner.budget_limit import within_limit
from memfit.planner.finalize.buffer_reuse import with_spares
from memfit.planner.finalize.merge_conv_backward import side_by_side
from memfit.sim.simulator import simulate

__all__ = ["leanest", "program_within", "quicker"]

_MOST_TOGETHER = 6
"""Most ops that are tried as a fused region at any place; longer regions only where each op passes its result on."""


def leanest(graph: StepGraph) -> StepGraph:
    """The step with every op in the variant that takes the least memory, and with estimated recomputation times."""
    read_backward = graph.read_whole_backward()

    def lean(op: Op) -> Op:
        made = _lean(op)
        whole = not read_backward.isdisjoint(op.later.writes)
        return structs.replace(made, estimated_seconds=_recompute_seconds(made.later, whole=whole))

    return structs.replace(graph, ops=tuple(map(lean, graph.ops)))


def quicker(graph: StepGraph, order: Sequence[int], budget_bytes: int) -> StepGraph:
    """The step with every op in the quickest variant for which there is room at all its places in an order.

    Orders are filled with saved copies after these variants are chosen, and not before: the same bytes save more time
    at the one instant at which an op runs.
    """
    lean = leanest(graph)
    room: dict[int, int] = {}
    for op, there in zip(order, _one_by_one(lean, lean, order, budget_bytes), strict=True):
        room[op] = min(room.get(op, budget_bytes), budget_bytes - there.peak_bytes)

    def chosen(index: int, op: Op) -> Op:
        more = room[index] + op.workspace_bytes
        variants = [w for w in op.variants if w.workspace_bytes <= more and (w.chunks > 1 or not op.in_place_over)]
        best = min(variants, key=lambda variant: variant.seconds, default=op.variant(op.chunks))
        return structs.replace(op, chunks=best.chunks, seconds=best.seconds, workspace_bytes=best.workspace_bytes)

    return structs.replace(lean, ops=tuple(chosen(index, op) for index, op in enumerate(lean.ops)))


def program_within(graph: StepGraph, order: Sequence[int], budget_bytes: int | None = None) -> Program:
    """The program of an order, with every op in the quickest variant that leaves the peak within a budget.

    Args:
        graph: the step.
        order: as for `program_of`.
        budget_bytes: for the peak; the lowest peak of the order if the budget is None or below that peak.

    Returns:
        The program.
    """
    lean = leanest(graph)
    limit = max(budget_bytes or 0, simulate(lean, program_of(lean, order)).peak_bytes)
    alone = _one_by_one(graph, lean, order, limit)
    ops = as_they_run(lean, order)
    dying = dying_after(lean, ops)
    runs = runs_by_slices(lean, ops, are_recomputed(order), dying)
    fused = [fusion for run in runs for fusion in _quickest(lean, run, alone, limit)]
    program = assembled(order, ops, dying, fused, lambda position: alone[position].instructions)
    program = within_limit(lean, program_of(lean, order), program, limit)
    program = within_limit(lean, program, with_spares(lean, program, limit), limit)
    return within_limit(lean, program, side_by_side(lean, program, limit), limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """An op that runs by itself, in the quickest variant for which there is room, and the frees after it.

    Attributes:
        instructions: the instruction that runs the op, and the frees.
        base_bytes: memory before it.
        peak_bytes: memory while its leanest variant runs.
        seconds: its time.
    """

    instructions: tuple[Instruction, ...]
    base_bytes: int
    peak_bytes: int
    seconds: float


def _one_by_one(graph: StepGraph, lean: StepGraph, order: Sequence[int], limit: int) -> list[_Alone]:
    """The ops of an order, each of them run by itself."""
    program = program_of(lean, order, fuse=False)
    instructions = program.instructions
    bytes_at = simulate(lean, program).bytes_at
    starts = [n for n, i in enumerate(instructions) if isinstance(i, Compute)]
    found: list[_Alone] = []
    stops = [*starts[1:], len(instructions)]
    both = zip(as_they_run(graph, order), as_they_run(lean, order), strict=True)
    for (given, op), start, stop in zip(both, starts, stops, strict=True):
        instruction = instructions[start]
        assert isinstance(instruction, Compute)
        over = instruction.over
        # An op that can be chunked cannot write over its operand if it runs whole; the operand stays until it is done.
        beside = 0 if over is None else graph.storages[over].nbytes
        room = limit - bytes_at[start] + op.workspace_bytes
        variants = [w for w in op.variants if w.workspace_bytes + (beside if w.chunks == 1 else 0) <= room]
        best = min(variants, key=lambda variant: variant.seconds, default=given.variant(given.chunks))
        made = structs.replace(instruction, chunks=best.chunks)
        frees = instructions[start + 1 : stop]
        # Writing over the operand can be slower: it then runs apart where there is room.
        slower = given.run_seconds(best.chunks, in_place=True) > given.run_seconds(best.chunks, in_place=False)
        if over is not None and best.chunks == 1 and (op.variants or (slower and beside <= room - op.workspace_bytes)):
            made, frees = structs.replace(made, over=None), (Free(over), *frees)
        created = sum(graph.storages[s].nbytes for s in op.writes) - beside
        found.append(
            _Alone(
                instructions=(made, *frees),
                base_bytes=bytes_at[start] - op.workspace_bytes - created,
                peak_bytes=bytes_at[start],
                seconds=given.run_seconds(best.chunks, in_place=made.over is not None),
            )
        )
    return found


def _quickest(graph: StepGraph, run: Run, alone: Sequence[_Alone], limit: int) -> list[Fusion]:
    """The fused regions with which a run takes the least time within a limit."""
    count = len(run.ops)
    sliced = [op.by_slices.seconds for op in run.ops if op.by_slices is not None]
    whole = [op.seconds for op in alone[run.start : run.start + count]]
    groups = {(first, stop) for first, stop in linked(run)}
    groups |= {(fusion.start - run.start, fusion.stop - run.start) for fusion in fusions(graph, [run])}
    groups |= {(i, j) for i in range(count) for j in range(i + 2, min(i + _MOST_TOGETHER, count) + 1)}
    by_stop: dict[int, list[int]] = {}
    for first, stop in groups:
        by_stop.setdefault(stop, []).append(first)
    # The least time until each place, and the fused region that ends there; None if the last op runs by itself.
    best: list[tuple[float, Fusion | None]] = [(0.0, None)]
    for stop in range(1, count + 1):
        here = alone[run.start + stop - 1]
        time = best[stop - 1][0] + (whole[stop - 1] if here.peak_bytes <= limit else float("inf"))
        choice: tuple[float, Fusion | None] = (time, None)
        for first in by_stop.get(stop, ()):
            if best[first][0] + sum(sliced[first:stop]) >= choice[0]:
                continue
            fusion, nbytes, seconds = fuse(graph, run.part(first, stop))
            time = best[first][0] + seconds
            if time < choice[0] and alone[run.start + first].base_bytes + nbytes <= limit:
                choice = (time, fusion)
        best.append(choice)
    found: list[Fusion] = []
    stop = count
    while stop > 0:
        _, last = best[stop]
        if last is not None:
            found.append(last)
        stop = stop - 1 if last is None else last.start - run.start
    return found


def _lean(op: Op) -> Op:
    # An op that can be chunked cannot write over its operand if it runs whole.
    variants = [variant for variant in op.variants if variant.chunks > 1 or not op.in_place_over] or op.variants
    best = min(variants, key=_memory_then_time, default=op.variant(op.chunks))
    again = None if op.recompute_as is None else _lean(op.recompute_as)
    return structs.replace(
        op, chunks=best.chunks, seconds=best.seconds, workspace_bytes=best.workspace_bytes, recompute_as=again
    )


def _recompute_seconds(op: Op, *, whole: bool) -> float:
    """Time of a recomputation: a result that is read whole later takes new memory, passed-on slices mostly none."""
    slices = op.by_slices
    found = [op.seconds]
    if not whole and op.in_place_seconds is not None:
        found.append(op.in_place_seconds)
    if slices is not None:
        found.append(slices.seconds + (slices.copy_seconds if whole else 0.0))
    return min(found)


def _memory_then_time(variant: Variant) -> tuple[int, float]:
    return variant.workspace_bytes, variant.seconds
