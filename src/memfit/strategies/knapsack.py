"""`knapsack`: torch's `activation_memory_budget` model, run on memfit's runtime.

Torch chooses the saved results of compute-intensive ops by a 0/1 knapsack: most time saved under a limit on saved
bytes; in its model pointwise ops are recomputed for free. It does not model the lifetimes of values, so the limit is
searched here until the simulated peak fits; users of torch do this by hand.

Source: `torch._functorch.partitioners.choose_saved_values_set` and `torch._functorch._activation_checkpointing`.
"""

from __future__ import annotations

from memfit.ir.graph import StepGraph
from memfit.ir.program import baseline_order, program_of
from memfit.planner.analysis.no_plan import no_plan
from memfit.planner.search.lazy_recompute import lazy_order
from memfit.planner.solver import Milp, solve
from memfit.sim.simulator import simulate
from memfit.strategies.openai import heavy_storages

__all__ = ["order"]

_STEPS = 24


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """The captured order if it fits, else the largest knapsack that fits; without a budget all heavy results are saved.

    Raises:
        BudgetError: if no size of the knapsack fits.
    """
    heavy = sorted(heavy_storages(graph))
    if budget_bytes is None:
        return lazy_order(graph, heavy)
    if simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes <= budget_bytes:
        return baseline_order(graph)
    whole = sum(graph.storages[s].nbytes for s in heavy)
    peaks: list[tuple[int, list[int]]] = []
    for step in range(_STEPS, -1, -1):
        found = lazy_order(graph, _chosen(graph, heavy, whole * step // _STEPS))
        peak = simulate(graph, program_of(graph, found)).peak_bytes
        if peak <= budget_bytes:
            return found
        peaks.append((peak, found))
    raise no_plan(
        *(graph, program_of(graph, min(peaks)[1]), budget_bytes),
        subject="order of strategy 'knapsack'",
        advice="strategy 'auto' may go lower",
    )


def _chosen(graph: StepGraph, heavy: list[int], limit: int) -> list[int]:
    if not heavy or limit <= 0:
        return []
    producer = graph.producers()
    problem = Milp()
    for storage in heavy:
        problem.variable(cost=-graph.ops[producer[storage]].recompute_seconds)
    problem.row({i: 1000 * graph.storages[s].nbytes / limit for i, s in enumerate(heavy)}, upper=1000.0)
    values = solve(problem, seconds=1.0).values
    return [s for s, value in zip(heavy, values, strict=True) if value > 0.5] if len(values) else []
