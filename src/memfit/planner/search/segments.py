"""Segment checkpointing: the common part of all strategies that cut the forward pass and recompute each part.

Between two checkpoints nothing is saved. When the backward pass first needs a storage of a segment, the segment is
recomputed as a whole and stays in memory until its backward pass is done, as with `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memfit.ir.graph import Phase, StepGraph
from memfit.ir.program import in_their_subgraphs
from memfit.planner.analysis.chain import Block, pinned_storages
from memfit.planner.bounds.relaxation import backward_reads

__all__ = ["segment_order", "storages_across"]


def storages_across(graph: StepGraph, position: int) -> list[int]:
    """Forward storages made before forward op `position` that this op or later forward ops read."""
    made = {s for op in graph.ops[:position] for s in op.writes}
    read = {s for op in graph.ops[position : graph.loss_index + 1] for s in op.reads}
    return sorted(made & read)


def segment_order(
    graph: StepGraph, cuts: Sequence[int], *, saved_segments: Collection[int] = (), saved: Collection[int] = ()
) -> list[int]:
    """The order in which segments are recomputed one by one.

    Args:
        graph: the step.
        cuts: forward ops at which a new segment begins, ascending, without the first op.
        saved_segments: segments that are not recomputed.
        saved: storages to save inside segments as well.

    Returns:
        Op indices.
    """
    loss = graph.loss_index
    producer = graph.producers()
    starts = [0, *cuts]
    segment_of = {}
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else loss
        segment_of.update(dict.fromkeys(range(start, end), number))
    alive = set(pinned_storages(graph)) | set(graph.held_to_the_end()) | set(saved)
    alive.update(s for s, op in enumerate(producer) if op < 0 or op >= loss)
    for cut in cuts:
        alive.update(storages_across(graph, cut))
    for op_index in range(loss):
        if segment_of[op_index] in saved_segments or not graph.ops[op_index].recomputable:
            alive.update(graph.ops[op_index].writes)
    wanted = backward_reads(graph)
    order = list(range(loss + 1))
    for index in range(loss + 1, len(graph.ops)):
        op = graph.ops[index]
        for storage in op.reads:
            if storage not in alive:
                segment = segment_of[producer[storage]]
                again = _needed_of_segment(graph, producer, segment_of, segment, wanted, alive)
                order.extend(again)
                alive.update(s for o in again for s in graph.ops[o].writes)
        order.append(index)
        alive.update(op.writes)
    return in_their_subgraphs(graph, order)


def _needed_of_segment(
    graph: StepGraph,
    producer: Sequence[int],
    segment_of: dict[int, int],
    segment: int,
    wanted: Collection[int],
    alive: Collection[int],
) -> list[int]:
    """Ops that make all storages of a segment that backward reads, and ops of earlier segments that these ops need."""
    stack = [
        s for o, n in segment_of.items() if n == segment for s in graph.ops[o].writes if s in wanted and s not in alive
    ]
    cone: set[int] = set()
    while stack:
        index = producer[stack.pop()]
        if index in cone or graph.ops[index].phase is not Phase.FORWARD:
            continue
        cone.add(index)
        stack.extend(s for s in graph.ops[index].reads if s not in alive)
    return sorted(cone)


def starts_of(blocks: Sequence[Block]) -> list[int]:
    """First ops of all blocks except the first block."""
    return [b.first for b in blocks[1:]]
