"""The chain: blocks tile the step, boundaries are what crosses a cut, and backward ops read nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.planner.analysis.chain import Chain, cut_chain, pinned_storages
from tests.ir.random_graphs import step_graphs
from tests.strategies.builders import chain, residual, unet


def names(graph: StepGraph, storages: tuple[int, ...]) -> set[str]:
    return {graph.storages[s].name for s in storages}


def starts(graph: StepGraph, cut: Chain) -> list[str]:
    return [graph.ops[block.first].name for block in cut.blocks]


@given(step_graphs(max_forward=10), st.integers(1, 8))
def test_blocks_tile_the_forward_and_the_backward_pass(graph: StepGraph, most: int) -> None:
    blocks = cut_chain(graph, most=most).blocks
    assert 1 <= len(blocks) <= most
    assert [i for b in blocks for i in range(b.first, b.last + 1)] == list(range(graph.loss_index))
    backward = [i for b in reversed(blocks) for i in range(b.backward_first, b.backward_stop)]
    assert backward == list(range(graph.loss_index, len(graph.ops)))


@given(step_graphs(max_forward=10))
def test_the_boundary_is_what_crosses_the_cut(graph: StepGraph) -> None:
    cut = cut_chain(graph)
    forward = range(graph.loss_index)
    for number, block in enumerate(cut.blocks):
        before = {s for i in forward if i < block.first for s in graph.ops[i].writes}
        after = {s for i in forward if i >= block.first for s in graph.ops[i].reads}
        assert set(block.boundary) == (before & after) - cut.pinned
        assert set(block.carried) == set(block.boundary) & set(cut.boundary_after(number))


@given(step_graphs(max_forward=10))
def test_backward_ops_of_later_blocks_read_nothing_before_the_boundary(graph: StepGraph) -> None:
    cut = cut_chain(graph)
    producer = graph.producers()
    for block in cut.blocks:
        for op in graph.ops[graph.loss_index : block.backward_stop]:
            for s in op.reads:
                if op.phase is Phase.BACKWARD and graph.storages[s].kind is StorageKind.FORWARD:
                    own = producer[s] >= block.first or s in block.boundary or s in cut.pinned
                    assert own or graph.ops.index(op) >= block.backward_first


@given(step_graphs(max_forward=10))
def test_what_is_held_or_runs_only_once_is_pinned(graph: StepGraph) -> None:
    pinned = pinned_storages(graph)
    assert {s for s in graph.outputs if graph.storages[s].kind is StorageKind.FORWARD} <= pinned
    for op in graph.ops[: graph.loss_index]:
        assert op.recomputable or pinned.issuperset(op.writes)
    free = graph.held_to_the_end() | graph.lasting() | {s for op in graph.ops if not op.recomputable for s in op.writes}
    total = sum(s.nbytes for s in graph.storages if s.kind is StorageKind.FORWARD)
    assert sum(graph.storages[s].nbytes for s in pinned - free) <= total / 1024


def test_a_plain_chain_is_cut_everywhere() -> None:
    graph = chain([8] * 10)
    assert starts(graph, cut_chain(graph)) == [f"l{i}" for i in range(9)]  # the last result is held


def test_too_many_cuts_are_thinned_evenly() -> None:
    graph = chain([8] * 16)
    lengths = [block.last + 1 - block.first for block in cut_chain(graph, most=4).blocks]
    assert sum(lengths) == 16 and len(lengths) == 4 and max(lengths) <= 6


def test_a_residual_network_is_cut_between_its_units() -> None:
    graph = residual(4)
    found = set(starts(graph, cut_chain(graph, most=5)))
    assert {f"u{u}_narrow" for u in range(1, 4)} <= found


def test_narrow_places_are_preferred() -> None:
    graph = chain([64, 64, 4, 64, 64, 4, 64, 64])
    assert starts(graph, cut_chain(graph, most=3)) == ["l0", "l3", "l6"]


def test_a_long_skip_is_carried() -> None:
    graph = unet(3)
    cut = cut_chain(graph)
    inner = [block for block in cut.blocks if graph.ops[block.first].name.startswith(("down1", "down2", "up1"))]
    assert len(cut.blocks) > 5 and len(inner) > 1
    assert all("down0_2" in names(graph, block.boundary) for block in inner)
    assert all("down0_2" in names(graph, block.carried) for block in inner[:-1])
