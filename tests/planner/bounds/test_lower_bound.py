"""No program takes less time than the relaxed bound says, whatever it writes over and runs in slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind, Variant
from memfit.ir.program import baseline_order, program_of
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.planner.bounds.relaxation import select_saved
from memfit.planner.finalize.variant_selection import program_within
from memfit.planner.solver import Solution, Status
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.ir.random_graphs import orders, sliced_steps_and_orders, step_graphs
from tests.strategies.builders import unet

_SHARES = st.integers(0, 8).map(lambda eighths: eighths / 8)


@st.composite
def priced(draw: st.DrawFn, graph: StepGraph) -> StepGraph:
    """The step with prices of runs over an operand, in chunks, and of putting slices together."""

    def price(op: Op | None) -> Op | None:
        if op is None:
            return None
        in_place = op.seconds * draw(_SHARES) if op.in_place_over else None
        slices = op.by_slices and replace(op.by_slices, copy_seconds=draw(_SHARES), copy_over_seconds=draw(_SHARES) / 4)
        whole = Variant(chunks=1, seconds=op.seconds, workspace_bytes=op.workspace_bytes)
        in_chunks = Variant(chunks=4, seconds=draw(_SHARES) * 2, workspace_bytes=draw(st.sampled_from([0, 10, 100])))
        variants = (whole, in_chunks) if draw(st.booleans()) else ()
        return replace(
            op, in_place_seconds=in_place, by_slices=slices, variants=variants, recompute_as=price(op.recompute_as)
        )

    return replace(graph, ops=tuple(made for op in graph.ops if (made := price(op)) is not None))


@st.composite
def in_place(draw: st.DrawFn) -> tuple[StepGraph, list[int]]:
    graph = draw(priced(draw(step_graphs(exact=draw(st.booleans())))))
    return graph, draw(orders(graph))


@st.composite
def in_slices(draw: st.DrawFn) -> tuple[StepGraph, list[int]]:
    graph, order = draw(sliced_steps_and_orders())
    return draw(priced(graph)), order


@given(st.one_of(in_place(), in_slices()))
@settings(max_examples=40)
def test_no_program_is_quicker(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    program = program_within(graph, order)
    check(graph, program)
    timeline = simulate(graph, program)
    assert timeline.step_seconds >= graph.seconds + relaxed_bound(graph, timeline.peak_bytes) - 1e-9


@given(in_place())
@settings(max_examples=40)
def test_what_nothing_reads_later_is_written_over_at_its_price(case: tuple[StepGraph, list[int]]) -> None:
    graph, _ = case
    timeline = simulate(graph, program_within(graph, range(len(graph.ops))))
    most = sum(max(op.seconds, *(variant.seconds for variant in op.variants), 0.0) for op in graph.ops)
    assert timeline.step_seconds <= most + graph.after_step_seconds + 1e-9
    assert timeline.step_seconds >= graph.seconds - 1e-9


def test_running_again_can_save_time() -> None:
    """An op that writes over its operand saves more than making that again takes."""
    kinds = [StorageKind.STATIC, StorageKind.FORWARD, StorageKind.FORWARD, StorageKind.TANGENT, StorageKind.GRADIENT]
    norm = Op(name="norm", target="f", phase=Phase.FORWARD, reads=(1,), writes=(2,), seconds=20.0)
    graph = StepGraph(
        storages=tuple(Storage(name=f"s{i}", nbytes=8, kind=kind) for i, kind in enumerate(kinds)),
        ops=(
            Op(name="convolution", target="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=2.0),
            replace(norm, in_place_over=(1,), in_place_seconds=1.0),
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(2,), writes=(3,), recomputable=False),
            Op(name="back", target="b", phase=Phase.BACKWARD, reads=(1, 3), writes=(4,), seconds=4.0),
        ),
        outputs=(2,),
    )
    timeline = simulate(graph, program_within(graph, [0, 1, 2, 0, 3]))
    assert timeline.step_seconds == 2.0 + 1.0 + 2.0 + 4.0
    assert graph.seconds == 2.0 + 20.0 + 4.0
    assert graph.seconds + relaxed_bound(graph, timeline.peak_bytes) == timeline.step_seconds


def test_memory_is_short_later_too() -> None:
    """In the middle of a U-Net's backward pass, what was made again for one skip waits beside the next gradient."""
    graph = unet(4)
    plain = simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes
    gains = []
    for percent in (90, 80, 70, 60, 50):
        budget = plain * percent // 100
        one_instant = select_saved(graph, budget - graph.static_bytes)
        if one_instant is not None:
            gains.append(relaxed_bound(graph, budget) - one_instant.bound_seconds)
    assert min(gains) >= 0
    assert max(gains) >= 1


def test_no_solution_in_time_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Solution(status=Status.UNKNOWN, values=np.zeros(0), objective=np.inf, bound=-np.inf)
    monkeypatch.setattr("memfit.planner.bounds.relaxation.solve", lambda *_, **__: unknown)
    graph = unet(4)
    selection = select_saved(graph, graph.static_bytes)
    assert selection is not None
    assert selection.saved == frozenset()
    assert selection.bound_seconds == 0.0


def test_a_leaner_variant_has_its_price() -> None:
    """Where an op fits only in chunks, the bound knows what that takes longer, and in between nothing is gained."""
    kinds = [StorageKind.STATIC, StorageKind.FORWARD, StorageKind.TANGENT, StorageKind.GRADIENT]
    variants = (Variant(chunks=1, seconds=1.0, workspace_bytes=40), Variant(chunks=4, seconds=3.0, workspace_bytes=0))
    back = Op(name="back", target="b", phase=Phase.BACKWARD, reads=(1, 2), writes=(3,), variants=variants)
    graph = StepGraph(
        storages=tuple(Storage(name=f"s{i}", nbytes=8, kind=kind) for i, kind in enumerate(kinds)),
        ops=(
            Op(name="make", target="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=2.0),
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(1,), writes=(2,), recomputable=False),
            replace(back, seconds=1.0, workspace_bytes=40),
        ),
    )
    assert relaxed_bound(graph, 64) <= 0.0
    assert relaxed_bound(graph, 24) == pytest.approx(2.0)
    assert simulate(graph, program_within(graph, [0, 1, 2], 24)).step_seconds == 5.0
