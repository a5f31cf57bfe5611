"""`swap`: swaps large activations out in the forward pass, and in again a few ops before the backward pass needs them.

Nothing is recomputed. Large Model Support has a size from which on tensors are swapped and a distance at which they are
fetched. The size is chosen here: the largest with which the peak fits, since activations that stay cost nothing.

Source: Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018).
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.ir.graph import StepGraph
from memfit.ir.program import baseline_order
from memfit.ir.tiers import Tier
from memfit.planner.offload.model import bring_back, peak_bytes, placed_on_tiers, swappable

__all__ = ["swaps"]

_AHEAD = 3
"""Backward ops between the start of a transfer back and its use."""


def swaps(graph: StepGraph, budget_bytes: int | None) -> tuple[list[int], Mapping[int, Tier]]:
    """Swaps activations from a size on.

    Args:
        graph: the step, with tiers.
        budget_bytes: for the peak; None swaps all activations that can be swapped.

    Returns:
        An order in which second runs stand for transfers back, and the tier of each swapped storage.
    """
    read_later = {s for op in graph.ops[graph.loss_index + 1 :] for s in op.reads}
    candidates = [s for s in swappable(graph) if s in read_later]
    sizes = sorted({graph.storages[s].nbytes for s in candidates}, reverse=True)
    order, placed = baseline_order(graph), dict[int, Tier]()
    for size in sizes if budget_bytes is not None else sizes[-1:]:
        if budget_bytes is not None and peak_bytes(graph, order, placed) <= budget_bytes:
            break
        placed = placed_on_tiers(graph, [s for s in candidates if graph.storages[s].nbytes >= size])
        order = bring_back(graph, baseline_order(graph), placed, ahead=_AHEAD)
    return order, placed
