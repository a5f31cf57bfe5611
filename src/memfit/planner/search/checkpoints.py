"""Storages to save at evenly spaced narrow places of the forward pass.

A recomputation does not reach back beyond a saved checkpoint, so the recomputation for one backward op takes at most
the memory of the segment between two checkpoints. With checkpoints, the selection is a smaller problem with a smaller
working set. The best number of checkpoints depends on the budget, so several numbers are tried.

Source: the segments of Chen et al. (2016), with the cuts chosen by bytes rather than by count.
"""

from __future__ import annotations

import numpy as np

from memfit.ir.graph import Phase, StepGraph
from memfit.planner.analysis.chain import cut_chain

__all__ = ["checkpoints"]


def checkpoints(graph: StepGraph, segments: int, *, most_cuts: int = 400) -> frozenset[int]:
    """The boundary storages of `segments - 1` cuts.

    Args:
        graph: the step.
        segments: number of segments, about equal in the bytes that backward reads.
        most_cuts: largest number of places to choose from.

    Returns:
        Forward storages to save.
    """
    blocks = cut_chain(graph, most=most_cuts).blocks
    read = {s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
    weights = [
        sum(graph.storages[s].nbytes for o in range(b.first, b.last + 1) for s in graph.ops[o].writes if s in read)
        for b in blocks
    ]
    done = np.cumsum([0.0, *weights]) / max(1.0, float(sum(weights)))
    widths = [sum(graph.storages[s].nbytes for s in b.boundary) for b in blocks]
    chosen: set[int] = set()
    for number in range(1, segments):
        near = [i for i in range(1, len(blocks)) if abs(done[i] - number / segments) <= 0.5 / segments]
        if near:
            chosen.add(min(near, key=lambda i: (widths[i], abs(done[i] - number / segments))))
    return frozenset(s for i in chosen for s in blocks[i].boundary)
