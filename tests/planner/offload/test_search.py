"""Swaps in plans: links are used as far as they carry, and tiers never make a plan slower."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.swap.main import byte_rate
from memfit.errors import BudgetError
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind, Variant
from memfit.ir.program import Program, baseline_order, program_of
from memfit.ir.tiers import Link, Tier, TierLinks, TransferSizes
from memfit.planner.bounds.lower_bound import relaxed_bound
from memfit.planner.bounds.relaxation import select_saved
from memfit.planner.effort import Effort
from memfit.planner.offload.model import placed_on_tiers, swappable
from memfit.planner.offload.search import _rounds, find_program
from memfit.planner.search.portfolio import find_order
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from memfit.strategies import program as strategy_program
from tests.ir.random_graphs import step_graphs
from tests.ir.random_swaps import links, steps_with_swaps
from tests.planner.chains import chain

MIB = 1 << 20


SMALL = TransferSizes(least_bytes=1)


def with_links(graph: StepGraph, rate: float, **facts: int) -> StepGraph:
    link = Link(bytes_per_second=rate)
    return replace(graph, tiers=(TierLinks(tier=Tier.DISK, out=link, into=link, sizes=SMALL, **facts),))


def residual_units(units: int, *, nbytes: int = MIB) -> StepGraph:
    """A residual network as a step: in each unit a slow op and two quick ones, all wide, all read backward."""
    storages = [Storage(name="x", nbytes=0, kind=StorageKind.STATIC)]
    ops: list[Op] = []

    def made(name: str, phase: Phase, reads: tuple[int, ...], seconds: float, kind: StorageKind) -> int:
        storages.append(Storage(name=name, nbytes=nbytes, kind=kind))
        writes = (len(storages) - 1,)
        ops.append(
            Op(name=name, target=name[:4], module=name[1:], phase=phase, reads=reads, writes=writes, seconds=seconds)
        )
        return writes[0]

    values = [0]
    for unit in range(units):
        slow = made(f"conv{unit}", Phase.FORWARD, (values[-1],), 1.0, StorageKind.FORWARD)
        norm = made(f"norm{unit}", Phase.FORWARD, (slow,), 0.2, StorageKind.FORWARD)
        values += [slow, norm, made(f"relu{unit}", Phase.FORWARD, (norm, values[-1]), 0.1, StorageKind.FORWARD)]
    gradient = made("loss", Phase.LOSS, (values[-1],), 0.0, StorageKind.TANGENT)
    for unit in reversed(range(units)):
        before, slow, norm, out = values[3 * unit : 3 * unit + 4]
        gradient = made(f"relu_back{unit}", Phase.BACKWARD, (gradient, out), 0.1, StorageKind.BACKWARD)
        gradient = made(f"norm_back{unit}", Phase.BACKWARD, (gradient, slow), 0.4, StorageKind.BACKWARD)
        gradient = made(f"conv_back{unit}", Phase.BACKWARD, (gradient, before), 2.0, StorageKind.BACKWARD)
    return StepGraph(ops=tuple(ops), storages=tuple(storages))


def baseline_peak(graph: StepGraph) -> int:
    return simulate(graph, program_of(graph, baseline_order(graph))).peak_bytes


def test_a_link_of_a_quarter_of_computes_rate_takes_a_third_of_the_overhead_away() -> None:
    graph = residual_units(20)
    budget = int(0.3 * baseline_peak(graph))
    alone = find_order(graph, budget, seconds=1.5).timeline
    found = find_program(with_links(graph, byte_rate(graph) / 4), budget, seconds=2.0)
    check(with_links(graph, byte_rate(graph) / 4), found.program)
    extra = found.timeline.step_seconds - graph.seconds
    assert 0 < extra <= 2 / 3 * (alone.step_seconds - graph.seconds)
    assert found.timeline.peak_bytes <= budget
    assert found.bound_seconds <= extra + 1e-9


@pytest.mark.parametrize("rate", [0.0, 0.25], ids=["alone", "with a link"])
def test_any_plan_of_the_least_bytes_is_found_at_once(rate: float) -> None:
    graph = residual_units(6)
    graph = with_links(graph, byte_rate(graph) * rate) if rate else graph
    with pytest.raises(BudgetError) as error:
        find_program(graph, 1, seconds=0.25)
    begin = time.monotonic()
    found = find_program(graph, error.value.least_bytes, seconds=60.0, any_speed=True)
    assert time.monotonic() - begin < 30.0  # a fast one is searched for as long as it is told to
    check(graph, found.program)
    assert found.timeline.peak_bytes <= error.value.least_bytes


def test_a_link_as_fast_as_compute_leaves_next_to_nothing() -> None:
    graph = residual_units(16)
    budget = int(0.4 * baseline_peak(graph))
    timeline = find_program(with_links(graph, 2 * byte_rate(graph)), budget, seconds=0.5).timeline
    assert timeline.step_seconds <= 1.02 * graph.seconds
    assert timeline.overlap > 0.9


def test_transfers_are_in_time_for_the_quickest_ways() -> None:
    def with_slow_variants(op: Op) -> Op:
        whole = Variant(chunks=1, seconds=op.seconds, workspace_bytes=100)
        slow = Variant(chunks=4, seconds=4 * op.seconds, workspace_bytes=0)
        return replace(op, workspace_bytes=100, variants=(whole, slow))

    graph = residual_units(12)
    graph = with_links(replace(graph, ops=tuple(map(with_slow_variants, graph.ops))), byte_rate(graph) / 4)
    timeline = find_program(graph, int(0.5 * baseline_peak(graph)), seconds=1.0).timeline
    assert timeline.out_bytes > 0
    assert timeline.stall_seconds < 0.01 * graph.seconds


def test_what_compute_waits_for_stays() -> None:
    graph = residual_units(12)
    budget = int(0.25 * baseline_peak(graph))
    rounds = _rounds(with_links(graph, byte_rate(graph) / 8), budget, 1.0, None, Effort())
    (first, *others) = [found for found in rounds if found is not None]
    assert first.timeline.stall_seconds > 0
    waited = {s for s, stall in first.timeline.stalls.items() if stall > graph.ops[graph.producers()[s]].seconds}
    assert waited and others
    assert all(waited.isdisjoint(other.program.swapped()) for other in others)


def test_a_useless_link_is_not_used() -> None:
    graph = residual_units(4)
    budget = int(0.5 * baseline_peak(graph))
    found = find_program(with_links(graph, 1.0), budget, seconds=0.25)
    assert not found.program.swapped()
    assert found.timeline.step_seconds <= find_order(graph, budget, seconds=0.25).timeline.step_seconds + 1e-9


@settings(max_examples=25)
@given(step_graphs(min_forward=3), links(), links(), st.floats(0.3, 1.0))
def test_tiers_never_make_a_plan_slower(graph: StepGraph, out: Link, into: Link, share: float) -> None:
    graph = replace(graph, after_step_bytes=0)
    budget = max(1, int(share * baseline_peak(graph)))
    swapping = replace(graph, tiers=(TierLinks(tier=Tier.DISK, out=out, into=into, sizes=SMALL),))
    try:
        alone = find_order(graph, budget, seconds=0.05).timeline.step_seconds
    except BudgetError as error:
        alone, least = float("inf"), error.least_bytes
    try:
        found = find_program(swapping, budget, seconds=0.05)
    except BudgetError as error:
        assert alone == float("inf")
        assert error.least_bytes <= least
        return
    check(swapping, found.program)
    assert found.timeline.peak_bytes <= budget
    assert found.timeline.step_seconds <= alone + 1e-9
    assert found.bound_seconds <= found.timeline.step_seconds - graph.seconds + 1e-6


@settings(max_examples=50)
@given(steps_with_swaps())
def test_no_program_is_quicker_than_the_bound(case: tuple[StepGraph, Program]) -> None:
    graph, program = case
    timeline = simulate(graph, program)
    assert timeline.step_seconds - graph.seconds >= relaxed_bound(graph, timeline.peak_bytes) - 1e-6


def test_what_a_tier_may_hold() -> None:
    graph = with_links(residual_units(12), 1e9, limit_bytes=7 * MIB)
    found = find_program(graph, int(0.5 * baseline_peak(graph)), seconds=0.3)
    check(graph, found.program)
    assert 0 < found.timeline.out_bytes <= 7 * MIB


def test_the_host_first_and_the_disk_for_the_rest() -> None:
    graph = residual_units(12)
    fast, slow = Link(bytes_per_second=1e9), Link(bytes_per_second=1e8)
    tiers = (
        TierLinks(tier=Tier.HOST, out=fast, into=fast, limit_bytes=5 * MIB, sizes=SMALL),
        TierLinks(tier=Tier.DISK, out=slow, into=slow, sizes=SMALL),
    )
    graph = replace(graph, tiers=tiers)
    found = find_program(graph, int(0.4 * baseline_peak(graph)), seconds=0.3)
    check(graph, found.program)
    assert found.timeline.tier_bytes[Tier.HOST] <= 5 * MIB
    assert found.timeline.tier_bytes[Tier.DISK] > 0


def test_buffers_count() -> None:
    graph = with_links(residual_units(12), 1e9, buffer_bytes=2 * MIB)
    budget = int(0.5 * baseline_peak(graph))
    found = find_program(graph, budget, seconds=0.3)
    assert found.program.swapped()
    assert found.timeline.peak_bytes <= budget
    without = simulate(replace(graph, tiers=()), found.program).peak_bytes
    assert found.timeline.peak_bytes == without + 2 * MIB


def test_what_has_no_time_to_leave_is_waited_for() -> None:
    graph = chain(4)
    everything = select_saved(with_links(graph, 1e9), 0)
    nothing = select_saved(with_links(graph, 1e-9), 0)
    assert everything is not None and nothing is not None
    assert everything.recompute_seconds == pytest.approx(0.0, abs=1e-6)
    assert nothing.recompute_seconds == pytest.approx(4.0)
    between = select_saved(with_links(graph, 10.0), 0)
    # Links take 1 s each way. The backward pass begins with the last two results: these are waited for or made again.
    assert between is not None and between.recompute_seconds == pytest.approx(2.0)
    assert set(between.swapped) == {1, 2}


@pytest.mark.parametrize("name", ["swap", "hybrid"])
def test_known_strategies_swap_as_little_as_fits(name: str) -> None:
    graph = with_links(residual_units(12), 1e9)
    moved: list[int] = []
    for share in (0.4, 0.6, 1.0):
        budget = int(share * baseline_peak(graph))
        found = strategy_program(name, graph, budget)
        check(graph, found)
        moved.append(simulate(graph, found).out_bytes)
        if share == 1.0:
            assert simulate(graph, found).peak_bytes <= budget
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0 < moved[0]


def test_each_tier_has_its_own_least_size() -> None:
    graph = residual_units(6, nbytes=MIB // 4)
    fast, slow = Link(bytes_per_second=1e9), Link(bytes_per_second=1e8)
    host = TierLinks(tier=Tier.HOST, out=fast, into=fast, limit_bytes=MIB // 2)
    disk = TierLinks(tier=Tier.DISK, out=slow, into=slow, sizes=TransferSizes(least_bytes=MIB))
    graph = replace(graph, tiers=(host, disk))
    placed = placed_on_tiers(graph, swappable(graph))
    assert list(placed.values()) == [Tier.HOST] * 2
