"""`rotor`: the optimal schedule of a chain of blocks, every block with the option that suits the memory left.

The forward pass is cut into blocks (`memfit.planner.analysis.chain`). A dynamic program decides for every stretch of
blocks and every amount of memory. Either it saves some storages of the stretch and selects a backward pass, or it saves
only the boundary before the stretch and recomputes the stretch later, any number of times. This reaches the lowest
budgets, where recomputed storages must be dropped and recomputed once more, and stays close to the relaxed bound
elsewhere.

The dynamic program rounds memory to slots. So the order behind each amount of memory is simulated, from the largest
amount down, until one order fits the budget. Time only grows on the way, hence the first order that fits is the
fastest, except for orders that the stride passes over.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (2019); Rockmate (Zhao et al., ICML 2023) for options within blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np

from memfit.ir.graph import Phase, StepGraph
from memfit.ir.program import baseline_order, in_their_subgraphs, program_of
from memfit.planner.analysis.chain import cut_chain
from memfit.planner.analysis.no_plan import no_plan
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.planner.effort import Effort
from memfit.planner.search.rotor.priced_options import Site, site_of
from memfit.planner.search.rotor.table import Table, fill, order_at
from memfit.sim.simulator import simulate

__all__ = ["fast_order", "least_bytes", "least_order", "order"]

_BLOCKS = 24
_SPAN = 64
"""Most forward ops of a stretch that is planned as a whole."""

_SLOTS = 2000
"""Number of slots of the memory that the baseline step takes in addition to static bytes."""

_HOPE = 1.03
"""Orders are tried up to this multiple of the available memory, since an order may take less than the table says."""

_STRIDE = 8
"""Stride over the amounts of memory on the way to the first amount whose order fits."""

_LOWEST = 8
"""Number of the lowest orders that are simulated to find the least peak."""

_PATIENCE, _MORE_PATIENCE, _AT_WALL = 6, 24, 1.5
"""Number of failed attempts at a narrower backward pass that ends the search; `_MORE_PATIENCE` for budgets up to
`_AT_WALL` times the widest op, where every byte counts."""

_NARROW = 0.5
"""Backward passes that take less than this share of the widest op are narrow enough."""


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """The fastest order of the table that fits the budget; the baseline order if it fits or without a budget.

    Raises:
        BudgetError: if none fits, with the least budget that works.
    """
    if budget_bytes is None or _peak(graph, baseline_order(graph)) <= budget_bytes:
        return baseline_order(graph)
    fitting = fast_order(graph, budget_bytes)
    if fitting is not None:
        return fitting
    least = least_order(graph)
    if _peak(graph, least) <= budget_bytes:
        return least
    raise no_plan(
        *(graph, program_of(graph, least), budget_bytes),
        subject="order of strategy 'rotor'",
        advice="strategy 'auto' may go lower",
    )


def fast_order(
    graph: StepGraph, budget_bytes: int, *, seconds: float = inf, effort: Effort | None = None
) -> list[int] | None:
    """The fastest order of the table that fits, None if none does.

    Args:
        graph: the step.
        budget_bytes: peak of the step.
        seconds: nominal seconds after which stretches of several blocks that are not priced yet are left out of the
            table.
        effort: counts the work, of the table once.
    """
    if budget_bytes < widest_op_bytes(graph):
        return None
    table = _table(graph, int((budget_bytes - graph.static_bytes) * _HOPE), seconds)
    effort = effort or Effort()
    effort.charge_once(("rotor", table.cells.shape, table.slot_bytes), table.effort_seconds)
    return _first_fitting(graph, table, _amounts(table)[::-1], budget_bytes, effort)


def _first_fitting(
    graph: StepGraph, table: Table, amounts: Sequence[int], budget_bytes: int, effort: Effort
) -> list[int] | None:
    """The order of the first amount that fits, searched near the first fitting amount in strides."""

    def fitting(slots: int) -> list[int] | None:
        found = in_their_subgraphs(graph, order_at(table, slots))
        effort.charge_ops(len(found))
        return found if _is_legal(graph, found) and _peak(graph, found) <= budget_bytes else None

    reached = next((n for n in range(0, len(amounts), _STRIDE) if fitting(amounts[n]) is not None), len(amounts))
    near = amounts[max(0, reached - _STRIDE + 1) : reached + 1]
    return next((found for slots in near if (found := fitting(slots)) is not None), None)


def least_bytes(graph: StepGraph) -> int:
    """The least budget for which `order` finds an order."""
    return _peak(graph, least_order(graph))


def least_order(graph: StepGraph) -> list[int]:
    """The order of the least peak."""
    return list(_least_order(graph))


@lru_cache(maxsize=8)
def _least_order(graph: StepGraph) -> tuple[int, ...]:
    limit = widest_op_bytes(graph) - graph.static_bytes
    while not (amounts := _amounts(table := _table(graph, limit))):
        limit += limit // 4 + 1
    found = [baseline_order(graph), *(in_their_subgraphs(graph, order_at(table, slots)) for slots in amounts[:_LOWEST])]
    lowest = min((one for one in found if _is_legal(graph, one)), key=lambda one: _peak(graph, one))
    # The order of a larger amount may take less than the table says: `order` must find nothing below the least peak.
    while (lower := fast_order(graph, _peak(graph, lowest) - 1)) is not None:
        lowest = lower
    return tuple(lowest)


def _amounts(table: Table) -> list[int]:
    """The least slots of memory for each time the whole chain can take, from the slowest to the fastest."""
    times = table.whole
    faster = times < np.concatenate([[np.inf], times[:-1]])
    return np.flatnonzero(faster).tolist()


def _is_legal(graph: StepGraph, found: list[int]) -> bool:
    """Whether no op is recomputed after the backward pass has left its subgraph."""
    running: int | None = None
    for index in found:
        op = graph.ops[index]
        if op.phase is Phase.BACKWARD:
            running = op.subgraph
        elif op.phase is Phase.FORWARD and running is not None and op.subgraph > running:
            return False
    return True


def _peak(graph: StepGraph, found: Sequence[int]) -> int:
    return simulate(graph, program_of(graph, found)).peak_bytes


def _table(graph: StepGraph, limit_bytes: int, seconds: float = inf) -> Table:
    """A table for memory up to a limit at least; with more patience where the limit is near the widest op."""
    slot_bytes = max(1, (_peak(graph, baseline_order(graph)) - graph.static_bytes) // _SLOTS)
    at_wall = limit_bytes + graph.static_bytes <= _AT_WALL * widest_op_bytes(graph)
    patience = _MORE_PATIENCE if at_wall else _PATIENCE
    return _filled(graph, slot_bytes, (limit_bytes // slot_bytes // 128 + 1) * 128, patience, seconds)


@lru_cache(maxsize=8)
def _filled(graph: StepGraph, slot_bytes: int, slots: int, patience: int, seconds: float) -> Table:
    return fill(_site(graph, patience, seconds), slots=slots, slot_bytes=slot_bytes)


@lru_cache(maxsize=8)
def _site(graph: StepGraph, patience: int, seconds: float) -> Site:
    narrow = int(_NARROW * (widest_op_bytes(graph) - graph.static_bytes))
    chain = cut_chain(graph, most=_BLOCKS)
    return site_of(graph, chain, span=_SPAN, narrow=narrow, patience=patience, seconds=seconds)
