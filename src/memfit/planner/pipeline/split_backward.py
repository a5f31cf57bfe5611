"""Splits a stage's backward pass: what another device waits for first, gradients of weights later.

Nobody waits for the gradient of a weight before the step ends, so it can be made when a device would be idle. The split
costs memory: until the second part has run, what it reads is held.

Source: Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from memfit.ir.graph import Phase, StepGraph, StorageKind

__all__ = ["deferrable", "deferred_last"]


def deferrable(graph: StepGraph) -> frozenset[int]:
    """The backward ops that no gradient which the step hands on depends on; none where it hands on none."""
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
    """The ops of a step in an order in which those that can wait come last, else as they are."""
    later = deferrable(graph)
    every = range(len(graph.ops))
    return [*(i for i in every if i not in later), *(i for i in every if i in later)]
