"""Ops that run again as one, a few samples of the batch at a time, so that what they hand on never exists whole.

A convolution, its normalisation and its activation that run again one after the other make three tensors of which
only the last is wanted. Run together, slice of the batch by slice (`Op.by_samples`), the others exist as slices
only. What comes in whole stays until the last slice is done; what goes out is there, whole, from the first on, and
may take the memory of what came in, sample for sample.

`fusions` finds runs of an order that may run so and do it where that lowers the memory of the run. Idea: operator
fusion and depth-first tiling of compilers, along the batch, where no bit changes.

Known limits: only ops that run again, since the first run of a batch normalisation takes statistics of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memfit.step.graph import Op, StepGraph

__all__ = ["Fusion", "fusions", "overwritten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Positions `start` to `stop` (excluded) of an order that run as one.

    Attributes:
        start: the first position.
        stop: the one after the last.
        over: by position, the storage whose memory the first result of the op there takes over.
    """

    start: int
    stop: int
    over: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive ops that could run slice by slice, with what dies after each."""

    start: int
    ops: Sequence[Op]
    dying: Sequence[Sequence[int]]


def overwritten(op: Op, dead: Sequence[int]) -> int | None:
    """Which of the storages that die at an op it writes over where it runs alone."""
    choices = op.in_place_over if op.in_place_over and op.writes[0] not in dead else ()
    return next((s for s in choices if s in dead), None)


def fusions(graph: StepGraph, ops: Sequence[Op], again: Sequence[bool], dying: Sequence[Sequence[int]]) -> list[Fusion]:
    """The runs of an order that take less memory as one.

    Args:
        graph: the step.
        ops: the ops of the order, as they run.
        again: whether the op at a position ran before.
        dying: storages whose copy is last read at a position.

    Returns:
        Runs that do not overlap, ascending.
    """
    held = graph.held_to_the_end()
    found: list[Fusion] = []
    start = 0
    while start < len(ops):
        stop = start
        written: set[int] = set()
        while stop < len(ops) and again[stop] and _follows(ops, start, stop, written, held):
            written.update(ops[stop].writes)
            stop += 1
        if stop - start > 1:
            found.extend(_within(graph, _Run(start=start, ops=ops[start:stop], dying=dying[start:stop])))
        start = max(stop, start + 1)
    return found


def _follows(ops: Sequence[Op], start: int, position: int, written: set[int], held: frozenset[int]) -> bool:
    """Whether the op at a position may run slice by slice with those from `start` on, which wrote `written`."""
    op, slices = ops[position], ops[position].by_samples
    if slices is None or not held.isdisjoint(op.writes) or not written.isdisjoint(op.writes):
        return False
    first = ops[start]
    assert first.by_samples is not None
    return (
        (slices.batch, slices.samples, op.piece) == (first.by_samples.batch, first.by_samples.samples, first.piece)
    ) and all(s in slices.reads for s in op.reads if s in written)


def _within(graph: StepGraph, run: _Run) -> list[Fusion]:
    """Cuts a run where nothing is handed on but what is needed later anyway, and keeps what is worth it."""
    born = {s: place for place, op in enumerate(run.ops) for s in op.writes}
    linked = [False] * len(run.ops)
    for place, dead in enumerate(run.dying):
        for storage in dead:
            linked[born.get(storage, place) : place] = [True] * (place - born.get(storage, place))
    found: list[Fusion] = []
    first = 0
    for place in range(len(run.ops)):
        if linked[place]:
            continue
        if place > first:
            part = _Run(start=run.start + first, ops=run.ops[first : place + 1], dying=run.dying[first : place + 1])
            over = _taken_over(graph, part)
            if _fused_bytes(graph, part, over) < _whole_bytes(graph, part):
                found.append(Fusion(start=part.start, stop=run.start + place + 1, over=over))
        first = place + 1
    return found


def _taken_over(graph: StepGraph, run: _Run) -> dict[int, int]:
    """For results that stay, an operand of the run that dies in it, of the same size and read by samples only."""
    inner = {s for dead in run.dying for s in dead}
    written: set[int] = set()
    may: set[int] = set()
    must_not: set[int] = set()
    for op in run.ops:
        assert op.by_samples is not None
        written.update(op.writes)
        may.update(op.by_samples.may_overwrite)
        must_not.update(s for s in op.reads if s not in op.by_samples.reads)
    free: list[int] = []
    over: dict[int, int] = {}
    for place, (op, dead) in enumerate(zip(run.ops, run.dying, strict=True)):
        free += [s for s in dead if s in may and s not in written and s not in must_not]
        size = graph.storages[op.writes[0]].nbytes
        taken = next((s for s in free if graph.storages[s].nbytes == size), None)
        if op.writes[0] not in inner and taken is not None:
            over[run.start + place] = taken
            free.remove(taken)
    return over


def _fused_bytes(graph: StepGraph, run: _Run, over: Mapping[int, int]) -> int:
    """The most memory of a run as one, beside what was there."""
    storages = graph.storages
    inner = {s for dead in run.dying for s in dead}
    whole = sum(storages[s].nbytes for op in run.ops for s in op.writes if s not in inner)
    whole -= sum(storages[s].nbytes for s in over.values())
    live, most = 0, 0
    born: set[int] = set()
    for op, dead in zip(run.ops, run.dying, strict=True):
        assert op.by_samples is not None
        live += sum(op.by_samples.slice_bytes(storages[s].nbytes) for s in op.writes)
        born.update(op.writes)
        most = max(most, live + op.by_samples.workspace_bytes)
        live -= sum(op.by_samples.slice_bytes(storages[s].nbytes) for s in dead if s in born)
    return whole + most


def _whole_bytes(graph: StepGraph, run: _Run) -> int:
    """The most memory of a run op by op, beside what was there."""
    storages = graph.storages
    live, most = 0, 0
    for op, dead in zip(run.ops, run.dying, strict=True):
        over = overwritten(op, dead)
        live += sum(storages[s].nbytes for s in op.writes) - (0 if over is None else storages[over].nbytes)
        most = max(most, live + op.workspace_bytes)
        live -= sum(storages[s].nbytes for s in dead if s != over)
    return most
