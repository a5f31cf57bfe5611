"""The captured step of a stage, whose results are gone before gradients come back.

A loop holds what a model returned while it makes the loss and its gradients. A stage hands its results to the engine,
which sends them to the next stage and drops them: between its passes a stage holds only what its backward pass reads.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.capture.training_step import Capture
from memfit.ir.graph import Op, Phase, StepGraph, StorageKind

__all__ = ["handing_over"]


def handing_over(capture: Capture) -> Capture:
    """The step with an op in front of the loss up to which results are held, instead of the loss itself."""
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
    return replace(
        capture,
        graph=replace(
            graph,
            ops=(*graph.ops[:at], hand_over, replace(loss, reads=()), *graph.ops[at + 1 :]),
            outputs=_held(graph),
        ),
        joint_ops=(*capture.joint_ops[:at], None, *capture.joint_ops[at:]),
    )


def _held(graph: StepGraph) -> tuple[int, ...]:
    """Gradients that came back and are held to the end, as in any step."""
    return tuple(s for s in graph.outputs if graph.storages[s].kind is StorageKind.TANGENT)
