"""Fused regions: ops that run together, a few samples at a time, so that intermediate results never exist whole.

A convolution, its normalisation and its activation that are recomputed one after the other make three tensors, but only
the last one is needed. If they run together, one slice of the batch after the other (`Op.by_slices`), the other two
exist as slices only. With the lever `tile` first runs and the backward pass can be fused too. There slices add up to
the gradients of weights: the sums are made in another order, so they are equal up to rounding. Operands that come in
whole stay until the last slice is done. Results that go out whole are in memory from the first slice on, and may take
the memory of an operand, sample for sample, or of a storage that nothing reads any more
(`memfit.planner.finalize.buffer_reuse`). For this buffer reuse a single op may also run slice by slice.

`runs_by_slices` finds the ops that may be fused, and `fusions` finds where fusing them lowers the memory; where fusing
is only quicker, the planner chooses (`memfit.planner.finalize.variant_selection`). Idea: operator fusion and
depth-first tiling of compilers, along the batch, where no bit changes.

Known limits: the first run of a batch normalisation takes statistics of all samples, so it runs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod

from memfit.ir.graph import Op, StepGraph
from memfit.ir.halo import spreads
from memfit.ir.streaming import bytes_in_flight, slices_moving, waited_seconds

__all__ = [
    "Fusion",
    "Run",
    "bytes_beside",
    "fuse",
    "fused_seconds",
    "fusions",
    "linked",
    "overwritten",
    "runs_by_slices",
]


_MOST_CUTS = 6
"""A fused region ends at most this many cuts after its start, unless it is the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Positions `start` to `stop` (excluded) of an order that are fused.

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
    """Consecutive ops that could run slice by slice, with the storages that die after each.

    Attributes:
        start: position of the first in an order.
        ops: as they run.
        dying: for each op the storages whose copy it uses last, including sums that nobody reads.
    """

    start: int
    ops: Sequence[Op]
    dying: Sequence[Sequence[int]]

    def part(self, first: int, stop: int) -> Run:
        """The ops from place `first` to before place `stop`."""
        return Run(start=self.start + first, ops=self.ops[first:stop], dying=self.dying[first:stop])

    def dying_as_one(self) -> list[list[int]]:
        """Like `dying`, but for fused ops: a sum stays whole until all ops are done, even if nobody reads it."""
        return [[s for s in dead if s not in _sums(op)] for op, dead in zip(self.ops, self.dying, strict=True)]


def overwritten(op: Op, dead: Sequence[int]) -> int | None:
    """The storage that an op writes over where it runs alone, among those that die at the op; None if there is none."""
    choices = op.in_place_over if op.in_place_over and op.writes[0] not in dead else ()
    return next((s for s in choices if s in dead), None)


def runs_by_slices(
    graph: StepGraph, ops: Sequence[Op], again: Sequence[bool], dying: Sequence[Sequence[int]]
) -> list[Run]:
    """The longest runs of ops in an order such that every part of a run could be fused.

    Args:
        graph: the step.
        ops: the ops of the order, as they run.
        again: whether the op at a position ran before.
        dying: storages whose copy is last read at a position.

    Returns:
        Runs of two and more ops that do not overlap, ascending.
    """
    held = graph.held_to_the_end()
    able = [_can_run_by_slices(op, ran) for op, ran in zip(ops, again, strict=True)]

    def taken(position: int, read: set[int]) -> AbstractSet[int]:
        return read | held if again[position] else read  # storages that the caller holds are written once

    found: list[Run] = []
    start = 0
    while start < len(ops):
        if not able[start]:
            start += 1
            continue
        stop = start
        written: set[int] = set()
        sums: set[int] = set()
        read: set[int] = set()
        while stop < len(ops) and able[stop] and _follows(ops, start, stop, written, sums, taken(stop, read)):
            written.update(ops[stop].writes)
            sums.update(_sums(ops[stop]))
            read.update(ops[stop].reads)
            stop += 1
        if stop < len(ops) and able[stop]:
            stop = _narrowest(graph, ops, again, dying, start, stop)
        if stop - start > 1:
            found.append(Run(start=start, ops=ops[start:stop], dying=dying[start:stop]))
        start = max(stop, start + 1)
    return found


def _narrowest(
    graph: StepGraph,
    ops: Sequence[Op],
    again: Sequence[bool],
    dying: Sequence[Sequence[int]],
    start: int,
    stop: int,
) -> int:
    """The end of a run from `start` that has to end at `stop` or before: where the fewest bytes are passed on.

    Only recomputed storages and storages that die until `stop` count; other results of first runs stay whole anyway.
    """
    dies_soon = {s for position in range(start, stop + 1) for s in dying[position]}
    counted: set[int] = set()
    across = least = 0
    best = stop
    for position in range(start, stop):
        for storage in ops[position].writes:
            if again[position] or storage in dies_soon:
                counted.add(storage)
                across += graph.storages[storage].nbytes
        for storage in counted.intersection(dying[position]):
            counted.discard(storage)
            across -= graph.storages[storage].nbytes
        if position == start or across <= least:
            least, best = across, position + 1
    return best


def _can_run_by_slices(op: Op, again: bool) -> bool:
    return op.by_slices is not None and (again or op.by_slices.first)


def fusions(graph: StepGraph, runs: Sequence[Run]) -> list[Fusion]:
    """The parts of runs that take less memory when they are fused."""
    return [fusion for run in runs for first, stop in linked(run) for fusion in _leanest(graph, run.part(first, stop))]


def _leanest(graph: StepGraph, run: Run) -> list[Fusion]:
    """The fused regions with which a run takes the least memory.

    Operands from outside a fused part stay until the part is done, so a run may be cut where such an operand is read
    last.
    """
    storages = graph.storages
    written: set[int] = set()
    cuts, before = [0], [0]  # and bytes in memory at each place, on top of those before the run
    for place, (op, dead) in enumerate(zip(run.ops, run.dying, strict=True)):
        written.update(op.writes)
        made = sum(storages[s].nbytes for s in op.writes)
        before.append(before[-1] + made - sum(storages[s].nbytes for s in dead))
        if any(s not in written and storages[s].nbytes for s in dead) and place + 1 < len(run.ops):
            cuts.append(place + 1)
    cuts.append(len(run.ops))
    # The least peak until each cut, and the fused regions until that cut.
    best: list[tuple[int, tuple[Fusion, ...]]] = [(0, ())]
    for number, stop in enumerate(cuts[1:], 1):
        choices: list[tuple[int, tuple[Fusion, ...]]] = []
        near = range(max(0, number - _MOST_CUTS), number)
        for earlier in near if stop < len(run.ops) else {0, *near}:
            first, (peak, fused) = cuts[earlier], best[earlier]
            part = run.part(first, stop)
            choices.append((max(peak, before[first] + _whole_bytes(graph, part)), fused))
            if stop - first > 1:
                fusion, nbytes, _ = fuse(graph, part)
                choices.append((max(peak, before[first] + nbytes), (*fused, fusion)))
        best.append(min(choices, key=lambda choice: choice[0]))
    return list(best[-1][1])


def fuse(graph: StepGraph, run: Run) -> tuple[Fusion, int, float]:
    """A fused run, its peak on top of the memory before it, and its time."""
    over = _taken_over(graph, run)
    positions = range(run.start, run.start + len(run.ops))
    dying = {s for dead in run.dying_as_one() for s in dead}
    seconds = sum(fused_seconds(run.ops, dying, [over.get(position) for position in positions]))
    seconds += sum(waited_seconds(graph, *slices_moving(graph, run.ops, dying), seconds))
    fusion = Fusion(start=positions.start, stop=positions.stop, over=over)
    return fusion, _fused_bytes(graph, run, over), seconds


def fused_seconds(ops: Sequence[Op], passed_on: Collection[int], over: Sequence[int | None]) -> list[float]:
    """Time of each op in a fused region, without the time for tiers, in seconds.

    Args:
        ops: as they run.
        passed_on: storages that exist as slices only.
        over: for each op the storage whose memory its first result takes over, if any.
    """
    found: list[float] = []
    for op, taken, spread in zip(ops, over, spreads(ops), strict=True):
        assert op.by_slices is not None
        seconds = op.by_slices.seconds * spread.work
        if op.writes[0] not in passed_on:
            seconds += op.by_slices.copy_seconds if taken is None else op.by_slices.copy_over_seconds
        found.append(seconds)
    return found


def bytes_beside(graph: StepGraph, ops: Sequence[Op], freed: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of slices in a fused run, on top of whole results: while each op runs, and after each free that follows it.

    Args:
        graph: the step.
        ops: as they run.
        freed: for each op the results of the run that die after it.
    """
    sizes = graph.storages
    live = sum(op.by_slices.total_bytes(s, sizes[s].nbytes) for op in ops if op.by_slices for s in op.writes)
    live += bytes_in_flight(graph, ops, {s for dead in freed for s in dead})
    slice_of: dict[int, int] = {}
    found: list[int] = []
    for op, dead, spread in zip(ops, freed, spreads(ops), strict=True):
        slices = op.by_slices
        assert slices is not None
        made = {s: slices.slice_bytes(s, sizes[s].whole_bytes, spread.share) for s in op.writes}
        slice_of.update(made)
        live += sum(made.values())
        found.append(live + int(slices.workspace_bytes * spread.share * prod(slices.grid)))
        for storage in dead:
            if storage in slice_of:
                live -= slice_of[storage]
                found.append(live)
    return found


def linked(run: Run) -> list[tuple[int, int]]:
    """Parts of a run, of two and more ops, cut where only storages needed after the run anyway are passed on."""
    born = {s: place for place, op in enumerate(run.ops) for s in op.writes}
    passed_on = [False] * len(run.ops)
    for place, dead in enumerate(run.dying_as_one()):
        for storage in dead:
            passed_on[born.get(storage, place) : place] = [True] * (place - born.get(storage, place))
    stops = [place + 1 for place, on in enumerate(passed_on) if not on]
    return [(first, stop) for first, stop in zip([0, *stops], stops, strict=False) if stop - first > 1]


def _sums(op: Op) -> tuple[int, ...]:
    return () if op.by_slices is None else op.by_slices.sums


def _follows(
    ops: Sequence[Op], start: int, position: int, written: set[int], sums: set[int], taken: AbstractSet[int]
) -> bool:
    """Whether the op at a position may be fused with the ops from `start` on, which wrote `written` and `sums`.

    It must not write storages that they wrote, nor storages in `taken`: those that they read existed before and stay
    until they are done. A sum is complete when all ops are done, so none of them reads it.
    """
    op, slices = ops[position], ops[position].by_slices
    assert slices is not None
    if not taken.isdisjoint(op.writes) or not written.isdisjoint(op.writes):
        return False
    first = ops[start]
    assert first.by_slices is not None
    return (slices.cut, op.subgraph) == (first.by_slices.cut, first.subgraph) and all(
        s in slices.reads and s not in sums for s in op.reads if s in written
    )


def _taken_over(graph: StepGraph, run: Run) -> dict[int, int]:
    """For each result that stays, an operand of the same size that dies in the run and is read by samples only.

    Not done for tiles: the next tile reads a part of the operand that this tile would write over.
    """
    if any(op.by_slices is not None and op.by_slices.grid for op in run.ops):
        return {}
    dying = run.dying_as_one()
    inner = {s for dead in dying for s in dead}
    written: set[int] = set()
    must_not: set[int] = set()
    for op in run.ops:
        assert op.by_slices is not None
        written.update(op.writes)
        must_not.update(s for s in op.reads if s not in op.by_slices.reads)
    free: list[int] = []
    over: dict[int, int] = {}
    for place, (op, dead) in enumerate(zip(run.ops, dying, strict=True)):
        free += [s for s in dead if graph.storages[s].reusable and s not in written and s not in must_not]
        made = graph.storages[op.writes[0]]
        taken = next((s for s in free if graph.storages[s].nbytes == made.nbytes), None)
        stays = op.writes[0] not in inner and op.writes[0] not in _sums(op) and made.stream is None
        if stays and taken is not None:
            over[run.start + place] = taken
            free.remove(taken)
    return over


def _fused_bytes(graph: StepGraph, run: Run, over: Mapping[int, int]) -> int:
    """The peak of a fused run, on top of the memory before it."""
    storages = graph.storages
    dying = run.dying_as_one()
    inner = {s for dead in dying for s in dead}
    whole = sum(storages[s].nbytes for op in run.ops for s in op.writes if s not in inner)
    whole -= sum(storages[s].nbytes for s in over.values())
    return whole + max(bytes_beside(graph, run.ops, dying))


def _whole_bytes(graph: StepGraph, run: Run) -> int:
    """The peak of a run op by op, on top of the memory before it."""
    storages = graph.storages
    live, most = 0, 0
    for op, dead in zip(run.ops, run.dying, strict=True):
        over = overwritten(op, dead)
        live += sum(storages[s].nbytes for s in op.writes) - (0 if over is None else storages[over].nbytes)
        most = max(most, live + op.workspace_bytes)
        live -= sum(storages[s].nbytes for s in dead if s != over)
    return most
