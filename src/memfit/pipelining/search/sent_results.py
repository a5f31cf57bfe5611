"""The captured step of a stage, whose results are freed before their gradients arrive.

A training loop holds the model's output while it computes the loss and its gradients. A stage hands its results to the
engine, which sends them to the next stage and drops them: between its passes, a stage holds only the tensors that its
backward pass reads.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from memfit.capture.training_step import Capture
from memfit.ir.graph import Op, Phase, StorageKind

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

    # Gradients of the stage's outputs (tangents) are held to the end of the step, as in any step.
    held = tuple(s for s in graph.outputs if graph.storages[s].kind is StorageKind.TANGENT)
    ops = (*graph.ops[:at], hand_over, structs.replace(loss, reads=()), *graph.ops[at + 1 :])
    handed_over = structs.replace(graph, ops=ops, outputs=held, baseline=None)
    baseline, baseline_ops = graph.baseline, capture.baseline_ops
    if baseline is not None:
        alone = replace(capture, graph=graph.without_memfit(), joint_ops=baseline_ops)
        found = handing_over(alone)
        handed_over = structs.replace(handed_over, baseline=found.graph.as_baseline())
        baseline_ops = found.joint_ops
    joint_ops = (*capture.joint_ops[:at], None, *capture.joint_ops[at:])
    return replace(capture, graph=handed_over, joint_ops=joint_ops, baseline_ops=baseline_ops)
