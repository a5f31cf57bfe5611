"""Splits a stage's backward pass: first the gradients that another device waits for, later the gradients of weights.

No device waits for the gradient of a weight before the step ends, so it can be computed when a device would be idle.
The split costs memory: the operands of the second part are held until it has run.

Source: Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from memfit.ir.graph import Phase, StepGraph, StorageKind

__all__ = ["deferrable", "deferred_last"]


def deferrable(graph: StepGraph) -> frozenset[int]:
    """The backward ops that no gradient returned by the step needs; none if the step returns no gradient."""
    needed = {s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.GRADIENT}
    if not needed:
        return frozenset()
    waited: set[int] = set()
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.phase is Phase.BACKWARD and not needed.isdisjoint(op.writes):
            waited.add(index)
            needed.update(op.reads)
    return frozenset(i for i, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD and i not in waited)


def deferred_last(graph: StepGraph) -> list[int]:
    """The ops of a step, with the ops that can wait last and otherwise in their order."""
    later = deferrable(graph)
    every = range(len(graph.ops))
    return [*(i for i in every if i not in later), *(i for i in every if i in later)]
