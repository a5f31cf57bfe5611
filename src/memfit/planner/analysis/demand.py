"""Times at which a stretch of the backward pass can need forward results.

Times are op indices. Within a stretch `[start, end)` a storage may be read directly, or be needed to recompute
ops whose results are read. The earliest and the latest time of such a need do not depend on the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.ir.graph import Phase, StepGraph, StorageKind

__all__ = ["Needs", "epoch_starts", "needs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a stretch of the backward pass; -1 means never.

    Attributes:
        first_read: by storage, the first backward op of the stretch that reads it.
        until: by storage, the last instant of the stretch at which it can be used.
        latest: by op, the latest instant at which it may first have to be recomputed.
        earliest: by op, the earliest such instant.
    """

    first_read: NDArray[np.int64]
    until: NDArray[np.int64]
    latest: NDArray[np.int64]
    earliest: NDArray[np.int64]


def needs_of(graph: StepGraph, start: int, end: int) -> Needs:
    """Finds the needs of backward ops `start` to `end - 1`."""
    first = np.full(len(graph.storages), -1)
    until = np.full(len(graph.storages), -1)
    for index in range(max(start, graph.loss_index + 1), end):
        for s in graph.ops[index].reads:
            first[s] = index if first[s] < 0 else first[s]
            until[s] = index
    readers: list[list[int]] = [[] for _ in graph.storages]
    for index in range(graph.loss_index):
        for s in graph.ops[index].reads:
            readers[s].append(index)
    latest = np.full(len(graph.ops), -1)
    earliest = np.full(len(graph.ops), -1)
    for index in reversed(range(graph.loss_index)):
        op = graph.ops[index]
        direct = [int(first[s]) for s in op.writes if first[s] >= 0]
        users = {u for s in op.writes for u in readers[s] if latest[u] >= 0}
        for s in op.writes:
            until[s] = max([int(until[s]), *(int(latest[u]) for u in readers[s])])
        if direct:
            latest[index] = min(direct)
        elif users:
            latest[index] = max(int(latest[u]) for u in users)
        moments = direct + [int(earliest[u]) for u in users]
        if moments:
            earliest[index] = min(moments)
    return Needs(first_read=first, until=until, latest=latest, earliest=earliest)


def epoch_starts(graph: StepGraph, epochs: int) -> list[int]:
    """Divides the backward pass into stretches that read about the same bytes of forward results.

    Boundaries move to a nearby place where few bytes are read on both sides.

    Args:
        graph: the step.
        epochs: number of stretches.

    Returns:
        The first op of each stretch, beginning with the loss.
    """
    loss, count = graph.loss_index, len(graph.ops)
    weight = np.zeros(count)
    crossing = np.zeros(count + 1)
    needs = needs_of(graph, loss + 1, count)
    last = np.full(len(graph.storages), -1)
    for index in range(loss + 1, count):
        if graph.ops[index].phase is Phase.BACKWARD:
            for s in graph.ops[index].reads:
                last[s] = index
    for s, storage in enumerate(graph.storages):
        if storage.kind is StorageKind.FORWARD and needs.first_read[s] >= 0:
            weight[needs.first_read[s]] += storage.nbytes
            crossing[needs.first_read[s] + 1] += storage.nbytes
            crossing[last[s] + 1] -= storage.nbytes
    crossing = np.cumsum(crossing)[:count]
    done = np.cumsum(weight) / max(1.0, weight.sum())
    starts = [loss]
    for number in range(1, epochs):
        target = min(count - 1, int(np.searchsorted(done, number / epochs)))
        near = [p for p in range(loss + 1, count) if abs(done[p] - number / epochs) < 0.3 / epochs] or [target]
        best = min(near, key=lambda p: (crossing[p], abs(p - target)))
        if best > starts[-1] + 1:
            starts.append(best)
    return starts
