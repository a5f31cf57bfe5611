"""Better orders from good ones: each order is filled for more memory than the budget, then spilled to the budget.

Filling removes the recomputations that cost most. Spilling then drops other storages than the first time, also because
the cost of each storage is changed a little at random. The new order is rarely much worse and sometimes better, and the
better orders are varied next.

Idea: iterated local search (Lourenço, Martin and Stützle, 2003).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from memfit.ir.graph import StepGraph
from memfit.planner.effort import Effort
from memfit.planner.search.spill_and_fill import fill, spill

__all__ = ["Pool", "varied"]

_MORE_MEMORY = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2)
"""Memory above the budget for which an order is filled, as a share of the budget."""

_WHIM = 0.3
"""Standard deviation of the logarithm of the factor of a storage's cost."""

_KEPT = 8


class Pool:
    """The best orders found, the best first.

    Attributes:
        orders: each with its time.
    """

    def __init__(self) -> None:
        self.orders: list[tuple[float, tuple[int, ...]]] = []

    def add(self, seconds: float, order: tuple[int, ...]) -> None:
        """Adds an order unless the pool has an order of the same time, which is most likely the same order."""
        if all(abs(seconds - known) > 1e-9 for known, _ in self.orders):
            self.orders = sorted([*self.orders, (seconds, order)])[:_KEPT]


def varied(graph: StepGraph, pool: Pool, budget_bytes: int, effort: Effort | None = None) -> Iterator[list[int]]:
    """Varies the orders of a pool within the budget, without end; the pool may grow meanwhile.

    Args:
        graph: the step.
        pool: orders to start from, at least one.
        budget_bytes: peak of the step.
        effort: counts the work.

    Yields:
        Orders that are spilled to the budget and not filled.
    """
    rng = random.Random(0)
    while True:
        _, order = pool.orders[min(int(rng.expovariate(0.6)), len(pool.orders) - 1)]
        more = fill(graph, order, int(budget_bytes * (1 + rng.choice(_MORE_MEMORY))), effort=effort)
        whims = [math.exp(rng.gauss(0, _WHIM)) for _ in graph.storages]
        fitting = spill(graph, more, budget_bytes, whims=whims, effort=effort)
        yield fitting if fitting is not None else list(order)
