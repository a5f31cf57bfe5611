"""`mu-two`: evict the activation with the best recompute ratio until the simulated peak fits.

The ratio of an activation is its bytes over the seconds it takes to make it again from what is still kept;
evicting one raises the cost of others, so ratios are kept up to date. Seed 003 measures this strategy with
whole-graph evictions; its long chains of evicted activations are why it pays so much.

Source: Purandare, Wasay, Idreos, Jain, "mu-TWO: 3x Faster Multi-Model Training with Orchestration and Memory
Optimization" (MLSys 2023); seed 003.

Known limits: recomputed activations are made once, right before their first use, and stay until their last.
"""

from __future__ import annotations

from memfit.errors import BudgetError
from memfit.planner.bound import backward_reads
from memfit.planner.chain import pinned_storages
from memfit.planner.lazy import lazy_order, missing_cone
from memfit.step.graph import StepGraph, StorageKind
from memfit.step.program import program_of
from memfit.step.simulate import simulate
from memfit.units import format_bytes

__all__ = ["order"]


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """Evicts until the budget holds; nothing without a budget.

    Raises:
        BudgetError: if evicting everything is not enough.
    """
    producer = graph.producers()
    held = graph.held_to_the_end()
    kept = {
        s
        for s in backward_reads(graph)
        if graph.storages[s].kind is StorageKind.FORWARD and s not in held and graph.ops[producer[s]].recomputable
    }
    always = {s for s, op in enumerate(producer) if op < 0} | held | pinned_storages(graph)
    best, least = lazy_order(graph, kept), None
    while budget_bytes is not None:
        peak = simulate(graph, program_of(graph, best)).peak_bytes
        if peak <= budget_bytes:
            break
        least = peak if least is None else min(least, peak)
        if not kept:
            raise BudgetError(
                f"evicting every activation leaves a peak above {format_bytes(budget_bytes)}; "
                f"the least peak is {format_bytes(least)}",
                budget_bytes=budget_bytes,
                least_bytes=least,
            )
        # A batch that covers a part of what is missing, so that the ratios stay current.
        missing = max(1, (peak - budget_bytes) // 4)
        for storage in sorted(kept, key=lambda s: -_ratio(graph, producer, kept | always, s)):
            kept.discard(storage)
            missing -= graph.storages[storage].nbytes
            if missing <= 0:
                break
        best = lazy_order(graph, kept)
    return best


def _ratio(graph: StepGraph, producer: list[int], alive: set[int], storage: int) -> float:
    cone = missing_cone(graph, producer, storage, lambda s: s in alive and s != storage)
    return graph.storages[storage].nbytes / (1e-9 + sum(graph.ops[o].seconds for o in cone))
