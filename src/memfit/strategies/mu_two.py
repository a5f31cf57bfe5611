"""`mu-two`: evicts the activation with the best recompute ratio, one after the other, until the simulated peak fits.

The ratio of an activation is its bytes over the seconds to recompute it from the activations that are still saved. Each
eviction makes other activations more expensive, so a ratio is updated when its turn comes. The strategy has been
measured down to 13 % of the peak, where the long chains of evicted activations cost seven times the step.

Source: Purandare, Wasay, Idreos, Jain, "mu-TWO: 3x faster multi-model training with orchestration and memory
optimization" (MLSys 2023).

Known limits: an evicted activation is recomputed once, right before its first use, and stays until its last use.
"""

from __future__ import annotations

import heapq

from memfit.ir.graph import StepGraph, StorageKind
from memfit.ir.program import baseline_order, program_of
from memfit.planner.analysis.no_plan import no_plan
from memfit.planner.bounds.relaxation import backward_reads
from memfit.planner.search.lazy_recompute import lazy_order, missing_cone
from memfit.sim.simulator import simulate

__all__ = ["order"]


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """Evicts activations until the peak is within the budget; evicts nothing without a budget.

    Raises:
        BudgetError: if evicting everything is not enough.
    """
    if budget_bytes is None:
        return baseline_order(graph)
    producer = graph.producers()
    fixed = _never_gone(graph, producer)
    saved = set(backward_reads(graph)) - fixed
    lowest: tuple[int, list[int]] | None = None
    ratios = [(-_ratio(graph, producer, saved | fixed, s), s) for s in sorted(saved)]
    heapq.heapify(ratios)
    while True:
        found = lazy_order(graph, saved)
        peak = simulate(graph, program_of(graph, found)).peak_bytes
        if peak <= budget_bytes:
            return found
        if lowest is None or peak < lowest[0]:
            lowest = peak, found
        if not ratios:
            break
        excess = peak - budget_bytes
        while ratios and excess > 0:  # evicting fewer bytes than the excess cannot be enough
            storage = _pop_best(graph, producer, saved | fixed, ratios)
            saved.discard(storage)
            excess -= graph.storages[storage].nbytes
    raise no_plan(
        *(graph, program_of(graph, lowest[1]), budget_bytes),
        subject="order of strategy 'mu-two'",
        advice="every activation was evicted that can be; strategy 'auto' may go lower",
    )


def _never_gone(graph: StepGraph, producer: list[int]) -> set[int]:
    """Storages that cannot be evicted: not made by the forward pass, held by the caller, or impossible to recompute."""
    held = graph.held_to_the_end() | graph.lasting()
    return {
        s
        for s, facts in enumerate(graph.storages)
        if facts.kind is not StorageKind.FORWARD or s in held or not graph.ops[producer[s]].recomputable
    }


def _pop_best(graph: StepGraph, producer: list[int], alive: set[int], ratios: list[tuple[float, int]]) -> int:
    """Takes the storage with the best ratio from the heap; ratios in the heap may be too high, never too low."""
    while True:
        _, storage = ratios[0]
        ratio = _ratio(graph, producer, alive, storage)
        if len(ratios) == 1 or -ratio <= min(ratios[1:3])[0]:
            heapq.heappop(ratios)
            return storage
        heapq.heapreplace(ratios, (-ratio, storage))


def _ratio(graph: StepGraph, producer: list[int], alive: set[int], storage: int) -> float:
    """Bytes over seconds; larger is better to evict."""
    cone = missing_cone(graph, producer, storage, lambda other: other != storage and other in alive)
    return graph.storages[storage].nbytes / (1e-9 + sum(graph.ops[o].recompute_seconds for o in cone))
