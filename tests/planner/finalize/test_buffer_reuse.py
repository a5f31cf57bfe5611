"""Results put together in memory that others leave: the same values, no more memory, no more time."""

from __future__ import annotations

from hypothesis import given, settings
from msgspec.structs import replace

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.instructions import computes_in
from memfit.ir.program import program_of
from memfit.ir.slicing import BySlices
from memfit.planner.finalize.buffer_reuse import with_spares
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.ir.random_graphs import sliced_steps_and_orders
from tests.sim.machine import run_on_machine


@given(sliced_steps_and_orders())
@settings(max_examples=100)
def test_the_values_stay_and_the_peak_and_the_time_do_not_rise(case: tuple[StepGraph, list[int]]) -> None:
    graph, order = case
    program = program_of(graph, order)
    before = simulate(graph, program)
    for more in (0, 100):
        changed = with_spares(graph, program, before.peak_bytes + more)
        check(graph, changed)
        assert changed.order() == order
        after = simulate(graph, changed)
        assert after.peak_bytes <= before.peak_bytes + more
        assert after.step_seconds <= before.step_seconds + 1e-9
        run_on_machine(graph, changed)


def test_a_gradient_that_nobody_reads_leaves_its_memory() -> None:
    """An op runs again after a gradient of the same size has died; over that it takes a third of the time."""
    forward, backward = StorageKind.FORWARD, StorageKind.BACKWARD
    kinds = [StorageKind.STATIC, forward, forward, StorageKind.TANGENT, backward, backward, StorageKind.GRADIENT]
    slices = BySlices(
        batch=4, samples=1, seconds=1.0, workspace_bytes=0, reads=(0,), copy_seconds=5.0, copy_over_seconds=1.0
    )
    b = Phase.BACKWARD
    graph = StepGraph(
        storages=tuple(
            Storage(name=f"s{i}", nbytes=100, kind=kind, reusable=kind is backward) for i, kind in enumerate(kinds)
        ),
        ops=(
            Op(name="one", target="f", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=6.0, by_slices=slices),
            Op(name="two", target="f", phase=Phase.FORWARD, reads=(1,), writes=(2,)),
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(2,), writes=(3,), recomputable=False),
            Op(name="first", target="b", phase=b, reads=(3,), writes=(4,)),
            Op(name="second", target="b", phase=b, reads=(4,), writes=(5,)),
            Op(name="third", target="b", phase=b, reads=(1, 5), writes=(6,)),
        ),
    )
    program = program_of(graph, [0, 1, 2, 3, 4, 0, 5])
    changed = with_spares(graph, program, simulate(graph, program).peak_bytes)
    (again,) = (i for i in computes_in(changed.instructions) if i.sliced)
    assert (again.over, again.chunks) == (4, 4)
    assert simulate(graph, changed).step_seconds == simulate(graph, program).step_seconds - 6.0 + 2.0
    assert simulate(graph, changed).peak_bytes == simulate(graph, program).peak_bytes
    check(graph, changed)
    theirs = replace(graph, storages=tuple(replace(s, reusable=False) for s in graph.storages))
    assert not any(i.sliced for i in computes_in(with_spares(theirs, program, 1 << 20).instructions))


def test_slices_take_room_from_what_is_held_across_them() -> None:
    """A storage is held for the second op that runs again, across the first one, which takes slices more than whole."""
    forward, backward = StorageKind.FORWARD, StorageKind.BACKWARD
    kinds = [StorageKind.STATIC, *[forward] * 3, StorageKind.TANGENT, *[backward] * 3, StorageKind.GRADIENT]
    slices = BySlices(batch=2, samples=1, seconds=1.0, workspace_bytes=0, reads=(0,))
    f, b = Phase.FORWARD, Phase.BACKWARD
    sizes = [0, 100, 40, 0, 0, 100, 40, 0, 0]
    graph = StepGraph(
        storages=tuple(
            Storage(name=f"s{i}", nbytes=nbytes, kind=kind, reusable=kind is backward)
            for i, (kind, nbytes) in enumerate(zip(kinds, sizes, strict=True))
        ),
        ops=(
            Op(name="one", target="f", phase=f, reads=(0,), writes=(1,), seconds=6.0, by_slices=slices),
            Op(name="two", target="f", phase=f, reads=(0,), writes=(2,), seconds=6.0, by_slices=slices),
            Op(name="three", target="f", phase=f, reads=(1, 2), writes=(3,)),
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(3,), writes=(4,), recomputable=False),
            Op(name="first", target="b", phase=b, reads=(4,), writes=(5, 6)),
            Op(name="second", target="b", phase=b, reads=(5, 6), writes=(7,)),
            Op(name="third", target="b", phase=b, reads=(1, 2, 7), writes=(8,)),
        ),
    )
    program = program_of(graph, [0, 1, 2, 3, 4, 5, 0, 1, 6])
    assert [i.over for i in computes_in(with_spares(graph, program, 1000).instructions) if i.sliced] == [5, 6]
    for limit in range(140, 260, 5):
        changed = with_spares(graph, program, limit)
        check(graph, changed)
        assert simulate(graph, changed).peak_bytes <= max(limit, simulate(graph, program).peak_bytes)


def test_a_free_between_halves_is_no_spare() -> None:
    """Without it both halves run in one call, with the larger workspace, which no room was reckoned for."""
    forward, backward = StorageKind.FORWARD, StorageKind.BACKWARD
    kinds = [StorageKind.STATIC, forward, forward, StorageKind.TANGENT, backward, backward]
    kinds += [StorageKind.GRADIENT, backward, StorageKind.GRADIENT]
    sizes = [0, 100, 0, 0, 100, 40, 0, 40, 0]
    slices = BySlices(batch=4, samples=1, seconds=1.0, workspace_bytes=0, reads=(0,), copy_over_seconds=1.0)
    f, b = Phase.FORWARD, Phase.BACKWARD
    graph = StepGraph(
        storages=tuple(
            Storage(name=f"s{i}", nbytes=nbytes, kind=kind, reusable=kind is backward)
            for i, (kind, nbytes) in enumerate(zip(kinds, sizes, strict=True))
        ),
        ops=(
            Op(name="one", target="f", phase=f, reads=(0,), writes=(1,), seconds=6.0, by_slices=slices),
            Op(name="two", target="f", phase=f, reads=(1,), writes=(2,)),
            Op(name="loss", target="loss", phase=Phase.LOSS, reads=(2,), writes=(3,), recomputable=False),
            Op(name="first", target="b", phase=b, reads=(3,), writes=(4, 5)),
            Op(name="weight", target="b", phase=b, reads=(4,), writes=(6,), workspace_bytes=50, half_of="call"),
            Op(name="data", target="b", phase=b, reads=(5,), writes=(7,), half_of="call"),
            Op(name="last", target="b", phase=b, reads=(1, 7), writes=(8,)),
        ),
    )
    program = program_of(graph, [0, 1, 2, 3, 4, 5, 0, 6])
    before = simulate(graph, program).peak_bytes
    for limit in range(before, before + 100, 5):
        changed = with_spares(graph, program, limit)
        check(graph, changed)
        assert simulate(graph, changed).peak_bytes <= limit
