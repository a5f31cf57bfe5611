"""Cost of each call of the forward graph, read from the profiled step of the whole model.

AOTAutograd records for each op of its graph the call from which the op comes, and gives an op of the backward pass the
sequence number of the forward op that it differentiates. Ops without a number (sums of gradients) count with the op
before them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from memfit.capture.training_step import Capture
from memfit.fxir.joint import JointOp
from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.pipeline.partition import CallCost

__all__ = ["call_costs", "often_used"]


def call_costs(forward: ForwardGraph, capture: Capture, graph: StepGraph) -> list[CallCost]:
    """The cost of each call of the forward graph, in order.

    Args:
        forward: the model and its loss.
        capture: of the whole model as one stage.
        graph: its profiled step.

    Returns:
        One cost for each of `forward.calls`.
    """
    of = _calls_of(capture)
    names = [node.name for node in forward.calls]
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    saved: dict[str, int] = defaultdict(int)
    widest: dict[str, int] = defaultdict(int)
    read_back = {s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
    first_seconds = graph.first_seconds()
    for index, (op, lean) in enumerate(zip(graph.ops, leanest(graph).ops, strict=True)):
        name = of.get(index)
        if name is None:
            continue
        seconds[name][op.phase is Phase.BACKWARD] += first_seconds[index]
        touched = {*lean.reads, *lean.writes} - set(lean.in_place_over[:1])
        nbytes = sum(graph.storages[s].nbytes for s in touched if not graph.is_free(s)) + lean.workspace_bytes
        widest[name] = max(widest[name], nbytes)
        saved[name] += sum(
            graph.storages[s].nbytes
            for s in op.writes
            if s in read_back and graph.storages[s].kind is StorageKind.FORWARD
        )
    states = _states_of(forward)
    return [
        CallCost(
            forward_seconds=seconds[name][0],
            backward_seconds=seconds[name][1],
            saved_bytes=saved[name],
            widest_bytes=widest[name],
            states=states[name],
        )
        for name in names
    ]


def often_used(forward: ForwardGraph) -> frozenset[str]:
    """Trained parameters that more than two calls read: the cuts decide in which order their gradients are added."""
    uses = Counter(name for names in _states_of(forward).values() for name in names)
    return frozenset(name for name, count in uses.items() if count > 2 and forward.tensors[name].requires_grad)


def _states_of(forward: ForwardGraph) -> Mapping[str, frozenset[str]]:
    return {
        node.name: frozenset(forward.states[operand] for operand in node.all_input_nodes if operand in forward.states)
        for node in forward.calls
    }


def _calls_of(capture: Capture) -> dict[int, str]:
    """For each op of the step, the call of the forward graph to which it belongs."""
    found: dict[int, str] = {}
    by_number: dict[int, str] = {}
    last: str | None = None
    for index, joint in enumerate(capture.joint_ops):
        if joint is None:
            continue
        name = _source(joint)
        number = joint.node.meta.get("seq_nr")
        if capture.graph.ops[index].phase is Phase.FORWARD and name is not None and number is not None:
            by_number.setdefault(number, name)
        if capture.graph.ops[index].phase is Phase.BACKWARD:
            name = by_number.get(number, last) if number is not None else last
        last = name or last
        if last is not None:
            found[index] = last
    return found


def _source(op: JointOp) -> str | None:
    sources = op.node.meta.get("from_node") or ()
    return sources[-1].name if sources else None
