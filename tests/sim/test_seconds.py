"""What a run costs: whole, over an operand, in slices, and in the step without memfit."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memfit.ir.fusion import fused_seconds
from memfit.ir.graph import Baseline, Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.program import baseline_order, program_of
from memfit.ir.serialization import decode_graph, encode_graph
from memfit.ir.slicing import BySlices
from memfit.sim.simulator import simulate, simulate_baseline


def baseline_of(graph: StepGraph, **activation: Any) -> StepGraph:
    """The step with another activation in its baseline step."""
    ops = tuple(replace(op.whole(), **activation if op.name == "relu" else {}) for op in graph.ops)
    return replace(graph, baseline=Baseline(ops=ops, storages=graph.storages, outputs=graph.outputs))


def step(activation: Op) -> StepGraph:
    """`x -> convolution -> activation -> loss`, and back."""
    kinds = [StorageKind.STATIC, StorageKind.FORWARD, StorageKind.FORWARD, StorageKind.TANGENT, StorageKind.GRADIENT]
    return StepGraph(
        storages=tuple(Storage(name=f"s{i}", nbytes=8, kind=kind) for i, kind in enumerate(kinds)),
        ops=(
            Op(name="convolution", target="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=4.0),
            activation,
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(2,), writes=(3,), recomputable=False),
            Op(name="back", target="b", phase=Phase.BACKWARD, reads=(2, 3), writes=(4,), seconds=8.0),
        ),
        outputs=(2,),
    )


ACTIVATION = Op(
    name="relu",
    target="aten.relu.default",
    phase=Phase.FORWARD,
    reads=(1,),
    writes=(2,),
    in_place_over=(1,),
    seconds=2.0,
    in_place_seconds=0.5,
)
SLICES = BySlices(
    batch=4, samples=1, seconds=1.0, workspace_bytes=0, reads=(1,), copy_seconds=0.25, copy_over_seconds=0.125
)


def test_a_run_over_its_operand_has_its_own_price() -> None:
    graph = step(ACTIVATION)
    assert simulate(graph, program_of(graph, baseline_order(graph))).step_seconds == 12.5
    assert simulate(graph, program_of(graph, baseline_order(graph), in_place=False)).step_seconds == 14.0
    assert graph.seconds == 12.5


def test_what_is_read_later_is_not_written_over_for_free() -> None:
    graph = step(ACTIVATION)
    late = replace(graph, ops=(*graph.ops[:3], replace(graph.ops[3], reads=(1, 2, 3))))
    assert late.seconds == 14.0


@pytest.mark.parametrize(("in_place", "seconds"), [(True, 12.5), (False, 14.0)])
def test_the_baseline_step_writes_over_what_the_model_does(in_place: bool, seconds: float) -> None:
    graph = step(ACTIVATION)
    if in_place:
        graph = baseline_of(graph, seconds=0.5)
    assert graph.plain_seconds == seconds
    assert simulate_baseline(graph).step_seconds == seconds


def test_the_baseline_step_may_run_something_else() -> None:
    graph = baseline_of(step(ACTIVATION), seconds=3.0, workspace_bytes=100, reads=(0,))
    assert graph.plain_seconds == 15.0
    plain = simulate_baseline(graph)
    assert plain.step_seconds == 15.0
    assert plain.peak_bytes == 8 + 100
    assert decode_graph(encode_graph(graph)) == graph


@pytest.mark.parametrize(("passed_on", "over", "seconds"), [({2}, None, 1.0), ((), None, 1.25), ((), 1, 1.125)])
def test_slices_are_put_together_at_a_price(passed_on: set[int], over: int | None, seconds: float) -> None:
    op = replace(ACTIVATION, by_slices=SLICES)
    assert fused_seconds([op], passed_on, [over]) == [seconds]
    assert decode_graph(encode_graph(step(op))) == step(op)
