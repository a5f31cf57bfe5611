"""Local search on an order, against the simulator: drops storages where memory overflows, keeps storages that fit.

**Spill.** Where an instant exceeds the budget, a storage that is alive but idle at this instant is dropped after its
last use before it and recomputed right before its next use after it. The recomputation runs the cone of ops back to
storages that are alive at that point. The storage with the least seconds per overflowing byte is dropped first. This
handles all cases in the same way: forward results saved for backward, recomputed results used twice, long skips.

**Fill.** Where there is room, a copy stays until the place where it would be recomputed. The ops that recompute it, and
ops that only serve them, are removed. Ops with the most seconds per byte and instant are removed first.

Idea: spilling and rematerialisation of register allocators; XLA's HloRematerialization does the first half.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.planner.analysis.live_ranges import Copy, Spans, spans_of
from memfit.planner.effort import Effort

__all__ = ["fill", "spill"]

_ROUND_WORK = 1.5
"""Work of a round that spills or fills, in multiples of the simulation of the order."""


def spill(
    graph: StepGraph,
    order: Sequence[int],
    budget_bytes: int,
    *,
    rounds: int = 400,
    whims: Sequence[float] | None = None,
    effort: Effort | None = None,
    seconds: float = float("inf"),
) -> list[int] | None:
    """Drops idle storages until the simulated peak is within the budget.

    Args:
        graph: the step.
        order: any valid order.
        budget_bytes: peak of the step.
        rounds: largest number of rounds that drop storages.
        whims: by storage, the factor of its cost; 1 if not given.
        effort: counts the work.
        seconds: effort at which to give up, in nominal seconds.

    Returns:
        A valid order within the budget, or None if spilling cannot reach it.
    """
    effort = effort or Effort()
    spans = spans_of(graph, order)
    producer = graph.producers()
    stuck = 0
    best = spans.bytes_at.max()
    for _ in range(rounds):
        if spans.timeline.peak_bytes <= budget_bytes:
            return list(spans.order)
        worst = int(np.argmax(spans.bytes_at))
        if spans.bytes_at[worst] <= budget_bytes:
            return None  # only optimizer.step() does not fit
        effort.charge_ops(_ROUND_WORK * len(spans.order))
        if effort.exceeds(seconds):
            return None
        changed = _spill_at(graph, spans, producer, worst, budget_bytes, whims)
        if changed is None:
            return None
        spans = spans_of(graph, without_unread(graph, changed))
        peak = spans.bytes_at.max()
        stuck = 0 if peak < best else stuck + 1
        best = min(best, peak)
        if stuck > 12 or len(spans.order) > 6 * len(graph.ops):
            return None
    return None


@dataclass(frozen=True, slots=True)
class _Drop:
    """A copy that can be absent from after position `left` to before `right`, if it is recomputed at `places`."""

    copy: Copy
    left: int
    right: int
    places: tuple[int, ...]


def _spill_at(
    graph: StepGraph,
    spans: Spans,
    producer: list[int],
    worst: int,
    budget_bytes: int,
    whims: Sequence[float] | None,
) -> list[int] | None:
    overflow = np.maximum(spans.bytes_at - budget_bytes, 0)
    alive_until = _alive(spans.copies)
    dying: dict[int, set[int]] = {}
    for copy in spans.copies:
        dying.setdefault(copy.dies, set()).add(copy.storage)
    scored: list[tuple[float, _Drop, list[list[int]]]] = []
    for drop in _drops(graph, spans, producer, worst):
        size = graph.storages[drop.copy.storage].nbytes
        relief = float(np.minimum(overflow[drop.left + 1 : drop.right], size).sum())
        if relief <= 0:
            continue
        cones = [_cone(graph, producer, drop.copy.storage, place, alive_until) for place in drop.places]
        made = [cone for cone in cones if cone is not None]
        if len(made) < len(cones):
            continue
        seconds = sum(graph.ops[o].recompute_seconds for cone in made for o in cone)
        seconds = max(0.0, seconds - _saved_over(graph, spans, drop, dying))
        # The recomputation must not overflow at a place that fits now.
        place, transient = drop.places[-1], _transient_bytes(graph, drop.copy.storage, made[-1])
        risk = max(0.0, float(spans.bytes_at[place - 1] + transient - budget_bytes)) / max(1, size)
        whim = 1.0 if whims is None else whims[drop.copy.storage]
        scored.append(((seconds + 1e-7) * (1 + risk) / relief * whim, drop, made))
    if not scored:
        return None
    scored.sort(key=lambda item: item[0])
    insertions: dict[int, list[int]] = {}
    gone: set[int] = set()
    need = int(overflow[worst])
    for _, drop, made in scored:
        storage = drop.copy.storage
        reads = {s for cone in made for o in cone for s in graph.ops[o].later.reads}
        writes = {s for cone in made for o in cone for s in graph.ops[o].later.writes}
        if need <= 0 or storage in gone or reads & gone or writes & gone:
            continue
        for place, cone in zip(drop.places, made, strict=True):
            insertions.setdefault(place, []).extend(o for o in cone if o not in insertions.get(place, ()))
        gone.add(storage)
        need -= graph.storages[storage].nbytes
    changed: list[int] = []
    for position, index in enumerate(spans.order):
        changed.extend(sorted(insertions.get(position, ())))
        changed.append(index)
    return changed


def _saved_over(graph: StepGraph, spans: Spans, drop: _Drop, dying: Mapping[int, set[int]]) -> float:
    """Seconds saved if the last op that reads a copy before it is dropped writes over it."""
    op = graph.ops[spans.order[drop.left]]
    op = op.later if spans.again[drop.left] else op
    if drop.copy.storage not in op.in_place_over or op.in_place_seconds is None:
        return 0.0
    if not dying.get(drop.left, set()).isdisjoint(op.in_place_over):
        return 0.0  # it already writes over another operand
    return op.seconds - op.in_place_seconds


def _transient_bytes(graph: StepGraph, storage: int, cone: list[int]) -> int:
    """Transient memory to recompute a storage, in bytes."""
    ops = [graph.ops[o].later for o in cone]
    if all(op.by_slices is not None for op in ops):
        return graph.storages[storage].nbytes
    return sum(graph.storages[s].nbytes for op in ops for s in op.writes)


def _drops(graph: StepGraph, spans: Spans, producer: list[int], worst: int) -> list[_Drop]:
    """Copies alive at a position that can be dropped there.

    These are the idle copies; a copy that the op at this position reads, if the op could write over it without a later
    read; and a copy that this op reads, if the op can take it slice by slice from the op that recomputes it.
    """
    op = graph.ops[spans.order[worst]]
    lasting = graph.lasting()
    slices = op.later.by_slices if spans.again[worst] else op.by_slices
    slices = slices if slices is not None and (spans.again[worst] or slices.first) else None
    found: list[_Drop] = []
    for copy in spans.copies:
        if copy.born >= worst or copy.dies < worst or graph.storages[copy.storage].kind is not StorageKind.FORWARD:
            continue
        maker = graph.ops[producer[copy.storage]]
        if not maker.recomputable or graph.storages[copy.storage].nbytes == 0 or copy.storage in lasting:
            continue
        after = bisect_left(copy.reads, worst)
        before = copy.reads[after - 1] if after else copy.born
        if copy.reads[after] > worst:
            found.append(_Drop(copy, before, copy.reads[after], (copy.reads[after],)))
            continue
        following = copy.reads[after + 1 : after + 2]
        if following and copy.storage in op.in_place_over:
            found.append(_Drop(copy, worst - 1, following[0], following))
        elif slices is not None and copy.storage in slices.reads and maker.later.by_slices and before < worst - 1:
            found.append(_Drop(copy, before, following[0] if following else worst + 1, (worst, *following)))
    return found


def _alive(copies: Sequence[Copy]) -> dict[int, list[tuple[int, int]]]:
    lives: dict[int, list[tuple[int, int]]] = {}
    for copy in copies:
        lives.setdefault(copy.storage, []).append((copy.born, copy.dies))
    return lives


def _cone(
    graph: StepGraph, producer: list[int], storage: int, position: int, lives: dict[int, list[tuple[int, int]]]
) -> list[int] | None:
    """Ops to run before `position` to recompute a storage; None if one cannot be recomputed or they are over 400."""

    def alive(s: int) -> bool:
        if producer[s] < 0 or s not in lives:
            return True  # static, or held by the caller
        return any(born < position <= dies for born, dies in lives[s])

    cone: set[int] = set()
    stack = [storage]
    while stack:
        index = producer[stack.pop()]
        if index in cone:
            continue
        op = graph.ops[index]
        if not op.recomputable or op.phase is not Phase.FORWARD or len(cone) > 400:
            return None
        cone.add(index)
        stack.extend(s for s in op.later.reads if not alive(s) and s not in op.writes)
    return sorted(cone)


def without_unread(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """Removes repeated ops whose new results no op reads."""
    held = graph.held_to_the_end()
    wanted: set[int] = set()
    seen: set[int] = set()
    first: set[int] = set()
    for position, index in enumerate(order):
        if index not in seen:
            first.add(position)
            seen.add(index)
    saved: list[int] = []
    for position in reversed(range(len(order))):
        op = graph.ops[order[position]]
        op = op if position in first else op.later
        if position not in first and not any(s in wanted for s in op.writes if s not in held):
            continue
        wanted.difference_update(op.writes)
        wanted.update(op.reads)
        saved.append(order[position])
    saved.reverse()
    return saved


def fill(
    graph: StepGraph, order: Sequence[int], budget_bytes: int, *, rounds: int = 30, effort: Effort | None = None
) -> list[int]:
    """Keeps copies in memory instead of recomputing them, where there is room; `effort` counts the work."""
    effort = effort or Effort()
    effort.charge_ops(_ROUND_WORK * len(order))
    spans = spans_of(graph, without_unread(graph, order))
    if spans.timeline.peak_bytes > budget_bytes:
        return list(order)
    most = len(order)
    for _ in range(rounds):
        effort.charge_ops(_ROUND_WORK * len(spans.order))
        changed, removed = _fill_once(graph, spans, budget_bytes, most)
        if removed == 0:
            break
        following = spans_of(graph, changed)
        if following.timeline.peak_bytes > budget_bytes:
            # Fused ops that are split may take more memory: keep fewer copies at a time.
            most = removed // 2
        elif following.timeline.recompute_seconds >= spans.timeline.recompute_seconds:
            break
        else:
            spans = following
    return list(spans.order)


def _fill_once(graph: StepGraph, spans: Spans, budget_bytes: int, most: int) -> tuple[list[int], int]:
    """Removes up to `most` recomputations; returns the new order and the number of recomputations removed."""
    previous: dict[int, Copy] = {}
    before: dict[tuple[int, int], Copy] = {}
    at: dict[int, list[Copy]] = {}
    for copy in sorted(spans.copies, key=lambda c: c.born):
        at.setdefault(copy.born, []).append(copy)
        if copy.storage in previous:
            before[copy.born, copy.storage] = previous[copy.storage]
        previous[copy.storage] = copy
    seen: set[int] = set()
    options: list[tuple[float, int, list[tuple[int, int, int]]]] = []
    for position, index in enumerate(spans.order):
        if index not in seen:
            seen.add(index)
            continue
        stretches = [
            (before[position, c.storage].dies, position, graph.storages[c.storage].nbytes)
            for c in at.get(position, ())
            if c.reads and (position, c.storage) in before
        ]
        area = sum(nbytes * (right - left) for left, right, nbytes in stretches)
        options.append((graph.ops[index].recompute_seconds / max(1, area), position, stretches))
    options.sort(key=lambda option: -option[0])
    room = budget_bytes - spans.bytes_at
    removed: set[int] = set()
    for _, position, stretches in options:
        if len(removed) == most:
            break
        if all(_fits(room, left, right, nbytes) for left, right, nbytes in stretches):
            for left, right, nbytes in stretches:
                room[left + 1 : right + 1] -= nbytes
            removed.add(position)
    return without_unread(graph, [o for p, o in enumerate(spans.order) if p not in removed]), len(removed)


def _fits(room: NDArray[np.int64], left: int, right: int, nbytes: int) -> bool:
    return bool(nbytes == 0 or (room[left + 1 : right] >= nbytes).all())
