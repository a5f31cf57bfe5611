"""`sqrt`: about √n segments of the chain, each recomputed as a whole.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import math

from memfit.ir.graph import StepGraph
from memfit.planner.analysis.chain import cut_chain
from memfit.planner.search.segments import segment_order

__all__ = ["order"]


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """√n segments; ignores the budget."""
    blocks = cut_chain(graph).blocks
    size = max(1, math.isqrt(len(blocks)))
    return segment_order(graph, [blocks[i].first for i in range(size, len(blocks), size)])
