"""An order from a choice of what to keep: everything else runs again right before its first use.

Between the loss and the end each op runs again at most once, and what it makes lives until its last reader;
given sets to carry on at later places too, at most once between two of these. This is the shape of every
checkpointing scheme, whatever chose what to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from memfit.step.graph import Phase, StepGraph

__all__ = ["lazy_order", "missing_cone"]


def lazy_order(
    graph: StepGraph, kept: Collection[int], carried: Mapping[int, Collection[int]] | None = None
) -> list[int]:
    """The plain order with forward ops repeated where a storage that is not there is first needed.

    Args:
        graph: the step.
        kept: forward storages to hold through the loss.
        carried: by backward op, the only forward storages to hold on to from there; others are dropped and
            made again when needed.

    Returns:
        Op indices for `memfit.step.program.program_of`.
    """
    loss = graph.loss_index
    producer = graph.producers()
    held = graph.held_to_the_end()
    pinned = set(held) | graph.lasting() | {s for s, op in enumerate(producer) if op == -1}
    for op in graph.ops[: loss + 1]:
        if not op.recomputable:
            pinned.update(op.writes)
    alive = pinned | set(kept) | set(graph.ops[loss].writes)
    order = list(range(loss + 1))
    for index in range(loss + 1, len(graph.ops)):
        op = graph.ops[index]
        if carried is not None and index in carried:
            alive = {s for s in alive if producer[s] > loss or s in pinned} | (alive & set(carried[index]))
            alive.update(graph.ops[loss].writes)
        for storage in op.reads:
            if storage not in alive:
                cone = missing_cone(graph, producer, storage, alive.__contains__)
                order.extend(cone)
                alive.update(s for again in cone for s in graph.ops[again].later.writes)
        order.append(index)
        alive.update(op.writes)
    return order


def missing_cone(graph: StepGraph, producer: list[int], storage: int, is_alive: Callable[[int], bool]) -> list[int]:
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
        op = graph.ops[index]
        # What lasts from the first run on is there.
        stack.extend(s for s in op.later.reads if s not in op.writes and producer[s] >= 0 and not is_alive(s))
    return sorted(cone)
