"""An order from a choice of what to keep: everything else runs again right before its first use.

Each op runs again at most once; what it makes lives until its last reader. This is the shape of every
one-level checkpointing scheme, whatever chose the kept storages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from memfit.step.graph import Phase, StepGraph

__all__ = ["lazy_order", "missing_cone"]


def lazy_order(graph: StepGraph, kept: Collection[int]) -> list[int]:
    """The plain order with forward ops repeated where a storage that was not kept is first needed.

    Args:
        graph: the step.
        kept: forward storages to hold from the forward pass to their last use in backward.

    Returns:
        Op indices for `memfit.step.program.program_of`.
    """
    loss = graph.loss_index
    producer = graph.producers()
    held = graph.held_to_the_end()
    alive = set(kept) | held
    for op in graph.ops[: loss + 1]:
        if not op.recomputable:
            alive.update(op.writes)
    alive.update(s for i, s in enumerate(producer) if s == -1 for s in [i])
    order = list(range(loss + 1))
    alive.update(graph.ops[loss].writes)
    for index in range(loss + 1, len(graph.ops)):
        op = graph.ops[index]
        for storage in op.reads:
            if storage not in alive:
                cone = missing_cone(graph, producer, storage, alive.__contains__)
                order.extend(cone)
                alive.update(s for again in cone for s in graph.ops[again].writes)
        order.append(index)
        alive.update(op.writes)
    return order


def missing_cone(
    graph: StepGraph, producer: list[int], storage: int, is_alive: Callable[[int], bool]
) -> list[int]:
    """The ops to run, in order, to have a storage again.

    Args:
        graph: the step.
        producer: `graph.producers()`.
        storage: what is needed.
        is_alive: whether a storage is in memory.

    Returns:
        Forward op indices, operands before users.
    """
    cone: set[int] = set()
    stack = [storage]
    while stack:
        index = producer[stack.pop()]
        if index in cone:
            continue
        assert graph.ops[index].phase is Phase.FORWARD and graph.ops[index].recomputable
        cone.add(index)
        stack.extend(s for s in graph.ops[index].reads if producer[s] >= 0 and not is_alive(s))
    return sorted(cone)
