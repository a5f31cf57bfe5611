"""`sequential:k`: k equal segments, all but the last recomputed.

This is the method of `torch.utils.checkpoint.checkpoint_sequential(functions, k, x)` with the blocks of the chain as
functions: `len // k` blocks in each segment; the last segment takes the rest and is not checkpointed.
"""

from __future__ import annotations

from memfit.ir.graph import StepGraph
from memfit.planner.analysis.chain import cut_chain
from memfit.planner.search.segments import segment_order

__all__ = ["order"]


def order(graph: StepGraph, budget_bytes: int | None, *, segments: int) -> list[int]:
    """Segments of equal length; ignores the budget."""
    blocks = cut_chain(graph).blocks
    count = min(segments, len(blocks))
    size = len(blocks) // count
    cuts = [blocks[i * size].first for i in range(1, count)]
    return segment_order(graph, cuts, saved_segments={count - 1})
