"""Ops that run again as one, a few samples of the batch at a time, so that what they hand on never exists whole.

A convolution, its normalisation and its activation that run again one after the other make three tensors of which
only the last is wanted. Run together, slice of the batch by slice (`Op.by_samples`), the others exist as slices
only. What comes in whole stays until the last slice is done; what goes out is there, whole, from the first on, and
may take the memory of what came in, sample for sample, or of what nothing reads any more (`memfit.planner.spares`);
for the latter an op may run slice by slice alone, too.

`runs_by_samples` finds what may run so, `fusions` where that lowers the memory; where it is only quicker is the
planner's choice (`memfit.planner.ways`). Idea: operator fusion and depth-first tiling of compilers, along the batch,
where no bit changes.

Known limits: only ops that run again, since the first run of a batch normalisation takes statistics of all samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from memfit.step.graph import Op, StepGraph

__all__ = ["Fusion", "Run", "fuse", "fused_seconds", "fusions", "linked", "overwritten", "runs_by_samples"]


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
class Run:
    """Consecutive ops that could run slice by slice, with what dies after each.

    Attributes:
        start: position of the first in an order.
        ops: as they run.
        dying: storages whose copy is last read by each.
    """

    start: int
    ops: Sequence[Op]
    dying: Sequence[Sequence[int]]

    def part(self, first: int, stop: int) -> Run:
        """The ops from place `first` to before place `stop`."""
        return Run(start=self.start + first, ops=self.ops[first:stop], dying=self.dying[first:stop])


def overwritten(op: Op, dead: Sequence[int]) -> int | None:
    """Which of the storages that die at an op it writes over where it runs alone."""
    choices = op.in_place_over if op.in_place_over and op.writes[0] not in dead else ()
    return next((s for s in choices if s in dead), None)


def runs_by_samples(
    graph: StepGraph, ops: Sequence[Op], again: Sequence[bool], dying: Sequence[Sequence[int]]
) -> list[Run]:
    """The longest runs of an order of which every part could run as one.

    Args:
        graph: the step.
        ops: the ops of the order, as they run.
        again: whether the op at a position ran before.
        dying: storages whose copy is last read at a position.

    Returns:
        Runs of two and more ops that do not overlap, ascending.
    """
    held = graph.held_to_the_end()
    found: list[Run] = []
    start = 0
    while start < len(ops):
        if not again[start]:
            start += 1
            continue
        stop = start
        written: set[int] = set()
        read: set[int] = set()
        while stop < len(ops) and again[stop] and _follows(ops, start, stop, written, read | held):
            written.update(ops[stop].writes)
            read.update(ops[stop].reads)
            stop += 1
        if stop - start > 1:
            found.append(Run(start=start, ops=ops[start:stop], dying=dying[start:stop]))
        start = max(stop, start + 1)
    return found


def fusions(graph: StepGraph, runs: Sequence[Run]) -> list[Fusion]:
    """The parts of runs that take less memory as one."""
    found: list[Fusion] = []
    for run in runs:
        for first, stop in linked(run):
            part = run.part(first, stop)
            fusion, nbytes, _ = fuse(graph, part)
            if nbytes < _whole_bytes(graph, part):
                found.append(fusion)
    return found


def fuse(graph: StepGraph, run: Run) -> tuple[Fusion, int, float]:
    """A run as one, the most memory it takes beside what was there, and its time."""
    over = _taken_over(graph, run)
    positions = range(run.start, run.start + len(run.ops))
    dying = {s for dead in run.dying for s in dead}
    seconds = fused_seconds(run.ops, dying, [over.get(position) for position in positions])
    fusion = Fusion(start=positions.start, stop=positions.stop, over=over)
    return fusion, _fused_bytes(graph, run, over), seconds


def fused_seconds(ops: Sequence[Op], handed_on: Collection[int], over: Sequence[int | None]) -> float:
    """What a run takes as one.

    Args:
        ops: as they run.
        handed_on: storages that exist as slices only.
        over: for each op the storage whose memory its first result takes over, if any.
    """
    seconds = 0.0
    for op, taken in zip(ops, over, strict=True):
        assert op.by_samples is not None
        seconds += op.by_samples.seconds
        if op.writes[0] not in handed_on:
            seconds += op.by_samples.copy_seconds if taken is None else op.by_samples.copy_over_seconds
    return seconds


def linked(run: Run) -> list[tuple[int, int]]:
    """Places of a run, cut where nothing is handed on but what is needed later anyway; of two ops and more."""
    born = {s: place for place, op in enumerate(run.ops) for s in op.writes}
    handed_on = [False] * len(run.ops)
    for place, dead in enumerate(run.dying):
        for storage in dead:
            handed_on[born.get(storage, place) : place] = [True] * (place - born.get(storage, place))
    stops = [place + 1 for place, on in enumerate(handed_on) if not on]
    return [(first, stop) for first, stop in zip([0, *stops], stops, strict=False) if stop - first > 1]


def _follows(ops: Sequence[Op], start: int, position: int, written: set[int], taken: set[int]) -> bool:
    """Whether the op at a position may run slice by slice with those from `start` on, which wrote `written`.

    It must not write what they wrote, nor what is `taken`: what they read was there before and stays until they are
    done, and what the caller holds is not written again.
    """
    op, slices = ops[position], ops[position].by_samples
    if slices is None or not taken.isdisjoint(op.writes) or not written.isdisjoint(op.writes):
        return False
    first = ops[start]
    assert first.by_samples is not None
    together = (first.by_samples.batch, first.by_samples.samples, first.piece)
    return (slices.batch, slices.samples, op.piece) == together and all(
        s in slices.reads for s in op.reads if s in written
    )


def _taken_over(graph: StepGraph, run: Run) -> dict[int, int]:
    """For results that stay, an operand of the run that dies in it, of the same size and read by samples only."""
    inner = {s for dead in run.dying for s in dead}
    written: set[int] = set()
    must_not: set[int] = set()
    for op in run.ops:
        assert op.by_samples is not None
        written.update(op.writes)
        must_not.update(s for s in op.reads if s not in op.by_samples.reads)
    free: list[int] = []
    over: dict[int, int] = {}
    for place, (op, dead) in enumerate(zip(run.ops, run.dying, strict=True)):
        free += [s for s in dead if graph.storages[s].reusable and s not in written and s not in must_not]
        size = graph.storages[op.writes[0]].nbytes
        taken = next((s for s in free if graph.storages[s].nbytes == size), None)
        if op.writes[0] not in inner and taken is not None:
            over[run.start + place] = taken
            free.remove(taken)
    return over


def _fused_bytes(graph: StepGraph, run: Run, over: Mapping[int, int]) -> int:
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


def _whole_bytes(graph: StepGraph, run: Run) -> int:
    """The most memory of a run op by op, beside what was there."""
    storages = graph.storages
    live, most = 0, 0
    for op, dead in zip(run.ops, run.dying, strict=True):
        over = overwritten(op, dead)
        live += sum(storages[s].nbytes for s in op.writes) - (0 if over is None else storages[over].nbytes)
        most = max(most, live + op.workspace_bytes)
        live -= sum(storages[s].nbytes for s in dead if s != over)
    return most
