import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import SpecError
from memfit.ir.graph import Baseline, StepGraph
from memfit.ir.program import whole_program
from memfit.ir.residents import ResidentKind
from memfit.planner.analysis.batch_scaling import difference, scaled
from memfit.sim.simulator import simulate_baseline
from memfit.sim.verifier import check
from tests.ir.random_graphs import step_graphs
from tests.residents import residents


def at_batch(graph: StepGraph, batch: int) -> StepGraph:
    """A step whose sizes and times grow with the batch; every third storage and op does not."""

    def grows(index: int) -> int:
        return 1 if index % 3 == 0 else batch

    storages = tuple(replace(s, nbytes=4 * s.nbytes * grows(i)) for i, s in enumerate(graph.storages))
    return replace(
        graph,
        storages=storages,
        baseline=Baseline(
            ops=tuple(
                replace(op.whole(), seconds=op.seconds * grows(i) * 2, workspace_bytes=8 * grows(i))
                for i, op in enumerate(graph.ops)
            ),
            storages=tuple(replace(s, nbytes=3 * s.nbytes) for s in storages),
            outputs=graph.outputs,
        ),
        ops=tuple(
            replace(
                op,
                seconds=op.seconds * grows(i),
                in_place_seconds=op.seconds * grows(i) / 2,
                workspace_bytes=op.workspace_bytes * grows(i + 1),
                in_place_over=(),
            )
            for i, op in enumerate(graph.ops)
        ),
        residents=residents(1000 + 10 * batch),
        after_step_bytes=7,
    )


@given(step_graphs(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 500))
@settings(max_examples=40)
def test_a_step_that_is_affine_in_the_batch_is_scaled_exactly(graph: StepGraph, a: int, b: int, batch: int) -> None:
    if a == b:
        return
    found, expected = scaled(at_batch(graph, a), a, at_batch(graph, b), b, batch), at_batch(graph, batch)
    assert found.storages == expected.storages
    assert (found.static_bytes, found.after_step_bytes) == (expected.static_bytes, expected.after_step_bytes)
    assert [op.workspace_bytes for op in found.ops] == [op.workspace_bytes for op in expected.ops]
    assert [op.seconds for op in found.ops] == pytest.approx([op.seconds for op in expected.ops])
    assert [op.in_place_seconds for op in found.ops] == pytest.approx([op.in_place_seconds for op in expected.ops])
    assert simulate_baseline(found).peak_bytes == simulate_baseline(expected).peak_bytes
    assert found.plain_seconds == pytest.approx(expected.plain_seconds)


@given(step_graphs(), st.integers(1, 50))
@settings(max_examples=40)
def test_a_program_of_one_size_is_a_program_of_every_size(graph: StepGraph, batch: int) -> None:
    two, four = at_batch(graph, 2), at_batch(graph, 4)
    check(scaled(two, 2, four, 4, batch), whole_program(two))


def with_first(graph: StepGraph, *, nbytes: int, seconds: float) -> StepGraph:
    first, *rest = graph.storages
    op, *ops = graph.ops
    return replace(
        graph,
        storages=(replace(first, nbytes=nbytes), *rest),
        ops=(replace(op, seconds=seconds, workspace_bytes=nbytes), *ops),
    )


@given(step_graphs(), st.integers(0, 100), st.integers(0, 100), st.integers(1, 100))
@settings(max_examples=40)
def test_sizes_are_whole_and_never_negative(graph: StepGraph, small: int, large: int, batch: int) -> None:
    found = scaled(
        with_first(graph, nbytes=small, seconds=small), 3, with_first(graph, nbytes=large, seconds=large), 7, batch
    )
    exact = small + (large - small) * (batch - 3) / 4
    assert max(0, exact) <= found.storages[0].nbytes < max(0, exact) + 1
    assert found.ops[0].workspace_bytes == found.storages[0].nbytes
    assert 0 <= found.ops[0].seconds <= max(large * batch / 7, small, large) + 1e-9


@given(step_graphs())
@settings(max_examples=40)
def test_only_one_graph_at_two_batch_sizes_can_be_scaled(graph: StepGraph) -> None:
    with pytest.raises(SpecError, match="two different batch sizes"):
        scaled(graph, 2, graph, 2, 8)
    fewer = replace(graph, ops=graph.ops[1:])
    assert "ops" in difference(graph, fewer)
    with pytest.raises(SpecError, match=r"batch 2 and 4 are different graphs: \d+ and \d+ ops"):
        scaled(graph, 2, fewer, 4, 8)
    op, *rest = graph.ops
    other = replace(graph, ops=(replace(op, target="aten.cos.default"), *rest))
    assert op.name in difference(graph, other)
    assert difference(graph, graph) == ""


@pytest.mark.parametrize(("spec", "shape"), [("zoo:mlp?width=32", (16,)), ("zoo:gpt?layers=1&width=16&heads=2", (8,))])
def test_a_captured_model_is_affine_in_the_batch(spec: str, shape: tuple[int, ...]) -> None:
    from memfit.capture.training_step import capture_step
    from memfit.zoo import build

    def captured(batch: int) -> StepGraph:
        example = build(spec, batch=batch, shape=shape)
        return capture_step(example.model, example.args, example.kwargs, loss_fn=example.loss_fn).graph

    found, real = scaled(captured(2), 2, captured(4), 4, 24), captured(24)
    assert difference(found, real) == ""
    assert [s.nbytes for s in found.storages] == [s.nbytes for s in real.storages]
    assert found.static_bytes == real.static_bytes


@given(step_graphs())
@settings(max_examples=10)
def test_memory_that_is_there_at_one_size_only_grows_from_nothing(graph: StepGraph) -> None:
    small, large = at_batch(graph, 4), at_batch(graph, 8)
    large = large.beside("a library", 1000, ResidentKind.LIBRARY)
    assert scaled(small, 4, large, 8, 8).static_bytes == large.static_bytes
    assert scaled(large, 8, small, 4, 12).static_bytes == at_batch(graph, 12).static_bytes + 2000
