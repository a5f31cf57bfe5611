"""The captured step of a stage with its backward pass in two parts (`memfit.planner.deferral`)."""

from __future__ import annotations

from dataclasses import replace

from memfit.capture.trace import Capture
from memfit.planner.deferral import deferrable, deferred_last

__all__ = ["read_later_bytes", "with_deferred"]


def with_deferred(capture: Capture) -> Capture:
    """The step with the gradients of weights last, which then can wait."""
    order = deferred_last(capture.graph)
    count = len(deferrable(capture.graph))
    return replace(
        capture,
        graph=replace(capture.graph, ops=tuple(capture.graph.ops[i] for i in order)),
        joint_ops=tuple(capture.joint_ops[i] for i in order),
        deferred=frozenset(range(len(order) - count, len(order))),
    )


def read_later_bytes(capture: Capture) -> int:
    """Of the inputs that a gradient is handed back for, what the second part reads: the rest need not wait for it."""
    later = {s for i in capture.deferred if (op := capture.joint_ops[i]) is not None for s in op.reads}
    (piece,) = capture.pieces.pieces
    reading = piece.reading
    handed_back = {
        reading.storage_of[node]
        for node, gradient in zip(reading.primals(), reading.gradient_of_input, strict=True)
        if gradient is not None and gradient not in reading.accumulated
    }
    return sum(reading.storages[storage].nbytes for storage in later & handed_back)
