"""The captured step of a stage with its backward pass in two parts (`memfit.planner.deferral`)."""

from __future__ import annotations

from dataclasses import replace

from memfit.capture.trace import Capture
from memfit.planner.deferral import deferrable, deferred_last

__all__ = ["with_deferred"]


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
