"""Orders in which ops that could be fused follow each other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.errors import ProgramError
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.program import program_of
from memfit.ir.slicing import BySlices
from memfit.planner.search.lazy_recompute import lazy_order, tiled_order
from memfit.sim.verifier import check


def step() -> StepGraph:
    """x -> a -> (draw) masked -> b -> (draw) masked -> loss -> backward through both; all but draws run in slices."""

    def sliced(name: str, phase: Phase, reads: tuple[int, ...], writes: int) -> Op:
        cut = BySlices(batch=8, samples=2, seconds=1e-3, workspace_bytes=0, reads=reads, first=True)
        return Op(name=name, target=name, phase=phase, reads=reads, writes=(writes,), seconds=1e-3, by_slices=cut)

    def draw(name: str, writes: int) -> Op:
        return Op(name=name, target=name, phase=Phase.FORWARD, reads=(), writes=(writes,), random_state_bytes=8)

    kinds = [StorageKind.STATIC, *[StorageKind.FORWARD] * 6, StorageKind.TANGENT, *[StorageKind.BACKWARD] * 2]
    kinds.append(StorageKind.GRADIENT)
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    return StepGraph(
        ops=(
            sliced("a", forward, (0,), 1),
            draw("draw a", 2),
            sliced("masked a", forward, (1, 2), 3),
            sliced("b", forward, (3,), 4),
            draw("draw b", 5),
            sliced("masked b", forward, (4, 5), 6),
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(6,), writes=(7,), recomputable=False),
            sliced("masked b back", backward, (7, 5), 8),
            sliced("masked a back", backward, (8, 2, 3), 9),
            sliced("a back", backward, (9, 0), 10),
        ),
        storages=tuple(Storage(name=str(i), nbytes=800, kind=kind) for i, kind in enumerate(kinds)),
        outputs=(6,),
    )


@pytest.mark.parametrize("kept", [(), (2, 5), (3,)])
def test_draws_come_before_the_run_they_would_divide_in_their_order(kept: tuple[int, ...]) -> None:
    graph = step()
    for order in (lazy_order(graph, kept), tiled_order(graph, kept), tiled_order(graph, kept, by_segments=True)):
        program = program_of(graph, order)
        check(graph, program)
        assert order[:6] == [1, 4, 0, 2, 3, 5]
        after = order[7:]
        draws = [place for place, index in enumerate(after) if index in (1, 4)]
        assert draws == list(range(len(draws)))


def test_a_draw_of_an_earlier_subgraph_waits_for_the_backward_pass_of_the_later_one() -> None:
    graph = step()
    later = {"b", "draw b", "masked b", "masked b back"}
    graph = replace(graph, ops=tuple(replace(op, subgraph=int(op.name in later)) for op in graph.ops))
    order = lazy_order(graph, {3, 5})
    assert order.count(1) == 2  # the draw of the first subgraph is recomputed
    check(graph, program_of(graph, order))


def test_draws_in_another_order_are_other_numbers() -> None:
    graph = step()
    with pytest.raises(ProgramError, match="draws other numbers"):
        check(graph, program_of(graph, [4, 1, 0, 2, 3, 5, 6, 1, 0, 2, 4, 7, 8, 9]))


def test_what_needs_a_run_stays_behind_it() -> None:
    graph = step()
    reading = replace(graph.ops[4], reads=(3,))
    graph = replace(graph, ops=(*graph.ops[:4], reading, *graph.ops[5:]))
    assert lazy_order(graph, (2, 3, 5))[:6] == [1, 0, 2, 3, 4, 5]
