"""What of a backward pass can wait: gradients that the step does not hand on, and nothing another op reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.program import whole_program
from memfit.planner.pipeline.split_backward import deferrable, deferred_last
from memfit.sim.verifier import check
from tests.ir.random_graphs import step_graphs


@given(step_graphs(), st.data())
def test_ops_that_wait_come_last_and_nothing_waits_for_them(graph: StepGraph, data: st.DataObject) -> None:
    # Gradients of weights are added to what is there, so the step hands on those of inputs only.
    gradients = [s for s, storage in enumerate(graph.storages) if storage.kind is StorageKind.GRADIENT]
    added = data.draw(st.sets(st.sampled_from(gradients))) if gradients else set()
    storages = [replace(x, kind=StorageKind.BACKWARD) if s in added else x for s, x in enumerate(graph.storages)]
    graph = replace(graph, storages=tuple(storages))
    later = deferrable(graph)
    order = deferred_last(graph)
    assert sorted(order) == list(range(len(graph.ops)))
    assert set(order[len(order) - len(later) :]) == later
    moved = replace(graph, ops=tuple(graph.ops[i] for i in order))
    check(moved, whole_program(moved))
    made_later = {s for i in later for s in graph.ops[i].writes}
    assert not any(made_later.intersection(op.reads) for i, op in enumerate(graph.ops) if i not in later)
    assert not any(graph.storages[s].kind is StorageKind.GRADIENT for s in made_later)
    assert all(graph.ops[i].phase is Phase.BACKWARD for i in later)
