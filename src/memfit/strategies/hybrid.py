"""`hybrid`: the checkpoints of `openai-memory`, some of them swapped out; other results are recomputed.

The first checkpoints are needed last, so the first ones are swapped out: the smallest number with which the peak fits.

Source: OME, which offloads the checkpoints of openai/checkpoints with Large Model Support.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.ir.graph import StepGraph
from memfit.ir.tiers import Tier
from memfit.planner.offload.model import bring_back, peak_bytes, placed_on_tiers, swappable
from memfit.strategies.openai import memory_order

__all__ = ["swaps"]


def swaps(graph: StepGraph, budget_bytes: int | None) -> tuple[list[int], Mapping[int, Tier]]:
    """Saves, swaps and recomputes results.

    Args:
        graph: the step, with tiers.
        budget_bytes: for the peak; None swaps every checkpoint.

    Returns:
        An order in which second runs of the producers of checkpoints stand for transfers back, and the tier of each
        swapped checkpoint.
    """
    order = memory_order(graph, budget_bytes)
    checkpoints = _checkpoints(graph, order)
    if budget_bytes is None:
        chosen = placed_on_tiers(graph, checkpoints)
        return bring_back(graph, order, chosen), chosen
    low, high = 0, len(checkpoints)
    while low < high:  # the peak falls with every checkpoint that is swapped out
        middle = (low + high) // 2
        placed = placed_on_tiers(graph, checkpoints[:middle])
        fits = peak_bytes(graph, bring_back(graph, order, placed), placed) <= budget_bytes
        low, high = (low, middle) if fits else (middle + 1, high)
    chosen = placed_on_tiers(graph, checkpoints[:low])
    return bring_back(graph, order, chosen), chosen


def _checkpoints(graph: StepGraph, order: list[int]) -> list[int]:
    """Storages made before the loss that the backward pass reads and does not recompute, the earliest made first."""
    loss = order.index(graph.loss_index)
    again = {s for index in order[loss:] for s in graph.ops[index].later.writes}
    read = {s for index in order[loss + 1 :] for s in graph.ops[index].reads}
    return [s for s in swappable(graph) if s in read and s not in again]
