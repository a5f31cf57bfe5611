"""Halves of a call run in that call where the peak leaves room for what would be freed between them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.instructions import Compute
from memfit.ir.program import Program, are_halves, program_of
from memfit.ir.serialization import decode_graph, encode_graph
from memfit.planner.finalize.merge_conv_backward import side_by_side
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check

_DATA, _GRADIENT_HALF, _DATA_HALF = 1, 3, 4


def convolution(*, half_of: str = "convolution", workspaces: tuple[int, int] = (50, 5)) -> StepGraph:
    """An input is made and read by a call with a weight; its backward pass is in halves, the weight's first."""
    kinds = [
        *(StorageKind.STATIC, StorageKind.FORWARD, StorageKind.FORWARD, StorageKind.TANGENT),
        *(StorageKind.GRADIENT, StorageKind.BACKWARD, StorageKind.GRADIENT),
    ]
    storages = tuple(Storage(name=f"s{i}", nbytes=100, kind=kind) for i, kind in enumerate(kinds))

    def op(name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...], workspace_bytes: int = 0) -> Op:
        half = half_of if "half" in name else ""
        facts = {"name": name, "target": "t", "phase": phase, "reads": reads, "writes": writes, "half_of": half}
        return Op(**facts, seconds=1.0, workspace_bytes=workspace_bytes)

    ops = (
        op("make", Phase.FORWARD, (0,), (_DATA,)),
        op("convolve", Phase.FORWARD, (_DATA, 0), (2,)),
        op("loss", Phase.LOSS, (2,), (3,)),
        op("weight half", Phase.BACKWARD, (3, _DATA), (4,), workspaces[0]),
        op("data half", Phase.BACKWARD, (3, 0), (5,), workspaces[1]),
        op("rest", Phase.BACKWARD, (5,), (6,)),
    )
    return StepGraph(ops=ops, storages=storages, outputs=(2,))


def halves_apart(program: Program) -> int:
    places = {i.op: n for n, i in enumerate(program.instructions) if isinstance(i, Compute)}
    return places[_DATA_HALF] - places[_GRADIENT_HALF]


@pytest.mark.parametrize("workspaces", [(50, 5), (5, 50)])
def test_the_free_between_waits_where_there_is_room(workspaces: tuple[int, int]) -> None:
    graph = convolution(workspaces=workspaces)
    program = program_of(graph, range(len(graph.ops)))
    assert halves_apart(program) == 2
    # Output, its gradient, input, both gradients, and the larger workspace of the halves.
    enough = 5 * 100 + max(workspaces)
    joined = side_by_side(graph, program, enough)
    check(graph, joined)
    assert halves_apart(joined) == 1 and joined.order() == program.order()
    assert simulate(graph, joined).peak_bytes == enough
    assert side_by_side(graph, program, enough - 1) == program


def test_other_ops_side_by_side_are_no_halves() -> None:
    graph = convolution(half_of="")
    program = program_of(graph, range(len(graph.ops)))
    assert side_by_side(graph, program, 10_000) == program


def test_what_runs_in_chunks_runs_alone() -> None:
    graph = convolution()
    first, second = (i for i in program_of(graph, [3, 4]).instructions if isinstance(i, Compute))
    assert are_halves(graph, first, second) and are_halves(graph, second, first)
    assert not are_halves(graph, first, first)
    for change in ({"chunks": 2}, {"sliced": True}, {"over": 0}):
        assert not are_halves(graph, first, replace(second, **change))


def test_halves_are_written_to_files() -> None:
    graph = convolution()
    assert decode_graph(encode_graph(graph)) == graph
