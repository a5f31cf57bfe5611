"""The captured step of a stage with its backward pass in two parts (`memfit.planner.pipeline.split_backward`)."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from memfit.capture.training_step import Capture
from memfit.planner.pipeline.split_backward import deferrable, deferred_last

__all__ = ["returning", "with_deferred"]


def with_deferred(capture: Capture) -> Capture:
    """The step with the gradients of weights last, so that their ops can be deferred."""
    order = deferred_last(capture.graph)
    count = len(deferrable(capture.graph))
    return replace(
        capture,
        graph=structs.replace(capture.graph, ops=tuple(capture.graph.ops[i] for i in order)),
        joint_ops=tuple(capture.joint_ops[i] for i in order),
        deferred=frozenset(range(len(order) - count, len(order))),
    )


def returning(capture: Capture) -> frozenset[int]:
    """The storages of a stage's inputs whose gradients the stage hands back."""
    (subgraph,) = capture.subgraphs.subgraphs  # its storages are those of the step
    reading = subgraph.reading
    return frozenset(
        reading.storage_of[node]
        for node, gradient in zip(reading.primals(), reading.gradient_of_input, strict=True)
        if gradient is not None and gradient not in reading.accumulated
    )
