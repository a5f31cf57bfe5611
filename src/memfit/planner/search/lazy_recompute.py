"""Orders for a selection of saved storages: every other storage is recomputed right before its first use.

Between the loss and the end of the step each op is recomputed at most once, and its results live until their last
reader. If sets of storages to carry are also given for later places, each op is recomputed at most once between two of
these places. Every checkpointing scheme has this shape, however its saved storages were selected. In a tiled step,
recomputed results can be dropped at once instead (`tiled_order`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping

from memfit.ir.graph import Op, Phase, StepGraph

__all__ = ["lazy_order", "missing_cone", "tiled_order"]


def lazy_order(
    graph: StepGraph, saved: Collection[int], carried: Mapping[int, Collection[int]] | None = None
) -> list[int]:
    """The baseline order, with forward ops repeated before the first use of a storage that is not in memory.

    Args:
        graph: the step.
        saved: forward storages to hold through the loss.
        carried: by backward op, the only forward storages that stay in memory from this op on; others are dropped and
            recomputed when needed.

    Returns:
        Op indices for `memfit.ir.program.program_of`.
    """
    loss = graph.loss_index
    producer = graph.producers()
    pinned = _pinned(graph, producer)
    alive = pinned | set(saved) | set(graph.ops[loss].writes)
    order = list(range(loss + 1))
    for index in range(loss + 1, len(graph.ops)):
        op = graph.ops[index]
        if carried is not None and index in carried:
            alive = {s for s in alive if producer[s] > loss or s in pinned} | (alive & set(carried[index]))
            alive.update(graph.ops[loss].writes)
        for storage in op.reads:
            if storage not in alive:
                cone = missing_cone(graph, producer, storage, alive.__contains__)
                order.extend(cone)
                alive.update(s for again in cone for s in graph.ops[again].later.writes)
        order.append(index)
        alive.update(op.writes)
    return _undivided(graph, order)


def tiled_order(
    graph: StepGraph, saved: Collection[int], *, forward: bool = False, by_segments: bool = False
) -> list[int]:
    """The baseline order; every storage that is not saved is recomputed for each fused region of the backward pass.

    A group is the ops of one such region. Between two groups, only saved storages of the forward pass are in memory:
    storages recomputed for a group exist as slices only. A group ends before an op that reads a sum made in the group,
    such as the op for the input gradient of a batch normalisation.

    Args:
        graph: a tiled step (`StepGraph.is_tiled`).
        saved: forward storages to hold through the loss.
        forward: whether to do the same in the forward pass, where groups end at the statistics of normalisations.
        by_segments: whether a group also ends where the backward pass reaches an earlier segment of the forward pass;
            segments end at the ops that make saved storages.

    Returns:
        Op indices for `memfit.ir.program.program_of`.
    """
    loss = graph.loss_index
    producer = graph.producers()
    order = _forward_in_groups(graph, producer, saved) if forward else list(range(loss))
    order.append(loss)
    alive = _pinned(graph, producer) | set(saved) | set(graph.ops[loss].writes)
    segments = _segments_read(graph, producer, saved if by_segments else ())
    start = loss + 1
    while start < len(graph.ops):
        stop = min(_end_of_group(graph, start), _end_of_segment(segments, start))
        read = {s for op in graph.ops[start:stop] for s in op.reads if producer[s] < loss and s not in alive}
        cones = (missing_cone(graph, producer, s, alive.__contains__) for s in read)
        order += sorted({index for cone in cones for index in cone})
        order += range(start, stop)
        alive.update(s for op in graph.ops[start:stop] for s in op.writes)
        start = stop
    return _undivided(graph, order)


def _undivided(graph: StepGraph, order: list[int]) -> list[int]:
    """An order in which ops that could be fused follow each other.

    An op between them that needs none of their storages and can only run whole, such as the draw of a mask, is moved
    before them. Moved ops keep their order among themselves, so a generator gives each op the same numbers. An op of
    an earlier subgraph is not moved, since it runs after the backward pass of this one.
    """
    if not graph.is_tiled:
        return order
    undivided: list[int] = []
    start, first = 0, graph.ops[order[0]]
    written: set[int] = set()
    read: set[int] = set()
    for position, index in enumerate(order):
        op = graph.ops[index]
        if op.by_slices is not None and (op.by_slices.first or op.recompute_as is not None):
            if first.by_slices is None or (op.by_slices.cut, op.subgraph) != (first.by_slices.cut, first.subgraph):
                start, first, written, read = position, op, set(), set()
            undivided.append(index)
            written.update(op.writes)
            read.update(op.reads)
        elif _is_apart(op) and op.subgraph >= first.subgraph and (written | read).isdisjoint((*op.reads, *op.writes)):
            undivided.insert(start, index)
            start += 1
        else:
            undivided.append(index)
            start, first, written, read = position + 1, op, set(), set()
    return undivided


def _is_apart(op: Op) -> bool:
    return op.phase is Phase.FORWARD and op.recomputable


def _forward_in_groups(graph: StepGraph, producer: list[int], saved: Collection[int]) -> list[int]:
    """The forward ops in order; slices that are not saved are recomputed for each group."""
    forgotten = {
        s
        for op in graph.ops[: graph.loss_index]
        if op.by_slices is not None and op.by_slices.first and op.recomputable
        for s in op.writes
        if s not in op.by_slices.sums
    }
    forgotten -= set(saved) | graph.held_to_the_end()
    order: list[int] = []
    start = 0
    while start < graph.loss_index:
        stop = min(_end_of_group(graph, start), graph.loss_index)
        made = {s for op in graph.ops[start:stop] for s in op.writes}
        missing = (s for op in graph.ops[start:stop] for s in op.reads if s in forgotten and s not in made)
        cones = [missing_cone(graph, producer, s, lambda s: s not in forgotten) for s in dict.fromkeys(missing)]
        order += sorted({index for cone in cones for index in cone})
        order += range(start, stop)
        start = stop
    return order


def _end_of_group(graph: StepGraph, start: int) -> int:
    """The first op from `start` on that cannot be fused with the ops before it."""
    first = graph.ops[start]
    written: set[int] = set()
    sums: set[int] = set()
    for index in range(start, len(graph.ops)):
        op = graph.ops[index]
        slices = op.by_slices
        if slices is None or not slices.first or first.by_slices is None:
            return max(index, start + 1)
        if (slices.cut, op.subgraph) != (first.by_slices.cut, first.subgraph):
            return index
        if not sums.isdisjoint(op.reads) or any(s in written and s not in slices.reads for s in op.reads):
            return index
        written.update(op.writes)
        sums.update(slices.sums)
    return len(graph.ops)


def _segments_read(graph: StepGraph, producer: list[int], saved: Collection[int]) -> list[int | None]:
    """For each op, the segment of the latest forward result that it reads; None if it reads none."""
    ends, loss = sorted(producer[s] for s in saved), graph.loss_index
    made = (max((p for s in op.reads if 0 <= (p := producer[s]) < loss), default=None) for op in graph.ops)
    return [None if last is None else bisect_left(ends, last) for last in made]


def _end_of_segment(segments: list[int | None], start: int) -> int:
    """The first op from `start` on that reads only results of earlier segments than the first op that reads any."""
    now: int | None = None
    for index in range(start, len(segments)):
        segment = segments[index]
        if now is not None and segment is not None and segment < now:
            return index
        now = segment if now is None else now
    return len(segments)


def _pinned(graph: StepGraph, producer: list[int]) -> set[int]:
    """Storages that are in memory through the loss in every plan."""
    pinned = set(graph.held_to_the_end()) | graph.lasting() | {s for s, op in enumerate(producer) if op == -1}
    for op in graph.ops[: graph.loss_index + 1]:
        if not op.recomputable:
            pinned.update(op.writes)
    return pinned


def missing_cone(graph: StepGraph, producer: list[int], storage: int, is_alive: Callable[[int], bool]) -> list[int]:
    """The ops to recompute, in order, to have a storage in memory again.

    Args:
        graph: the step.
        producer: `graph.producers()`.
        storage: the storage that is needed.
        is_alive: whether a storage is in memory.

    Returns:
        Forward op indices, operands before users.
    """
    cone: set[int] = set()
    stack = [storage]
    while stack:
        index = producer[stack.pop()]
        if index in cone:
            continue
        assert graph.ops[index].phase is Phase.FORWARD and graph.ops[index].recomputable
        cone.add(index)
        op = graph.ops[index]
        # Results that only the first run of the op makes are still in memory.
        stack.extend(s for s in op.later.reads if s not in op.writes and producer[s] >= 0 and not is_alive(s))
    return sorted(cone)
