"""The captured step of a stage, whose results are freed before their gradients arrive.

A training loop holds the model's output while it computes the loss and its gradients. A stage hands its results to the
engine, which sends them to the next stage and drops them: between its passes, a stage holds only the tensors that its
backward pass reads.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from memfit.capture.training_step import Capture
from memfit.ir.graph import Op, Phase, StepGraph, StorageKind

__all__ = ["handing_over"]


def handing_over(capture: Capture) -> Capture:
    """The step with a hand-over op before the loss; results are held until this op instead of until the loss."""
    graph = capture.graph
    at = graph.loss_index
    loss = graph.ops[at]
    hand_over = Op(
        name="hand-over",
        target="hook.hand-over.default",
        phase=Phase.FORWARD,
        subgraph=loss.subgraph,
        reads=loss.reads,
        writes=(),
        recomputable=False,
    )

    def with_hand_over(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return (*ops[:at], hand_over, structs.replace(ops[at], reads=()), *ops[at + 1 :])

    baseline = graph.baseline
    if baseline is not None:
        baseline = structs.replace(baseline, ops=with_hand_over(baseline.ops))
    return replace(
        capture,
        graph=structs.replace(graph, ops=with_hand_over(graph.ops), baseline=baseline, outputs=_held(graph)),
        joint_ops=(*capture.joint_ops[:at], None, *capture.joint_ops[at:]),
    )


def _held(graph: StepGraph) -> tuple[int, ...]:
    """Gradients of the stage's outputs (tangents) that are held to the end of the step, as in any step."""
    return tuple(s for s in graph.outputs if graph.storages[s].kind is StorageKind.TANGENT)
