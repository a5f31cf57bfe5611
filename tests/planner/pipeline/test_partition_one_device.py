"""Cuts for stages that take turns on one device hold as little as any others, and are even where that costs nothing."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from memfit.planner.pipeline.partition import CallCost, CutPlace, balance, demands
from memfit.planner.pipeline.partition_one_device import cuts_holding_least
from memfit.planner.pipeline.schedule import Pass, gpipe, on_one_device, one_forward_one_backward


def cut(saved: list[int], crossing: list[int], count: int, microbatches: int, make=one_forward_one_backward):
    """The cuts found, and for any cuts what is held at the worst moment."""
    calls = [CallCost(forward_seconds=1.0, backward_seconds=2.0, saved_bytes=nbytes) for nbytes in saved]
    places = [CutPlace(position=number, nbytes=nbytes) for number, nbytes in enumerate([0, *crossing, 0])]
    demand = demands(calls, places, {})
    order = on_one_device(make(count, microbatches)).orders[0]

    def held(cuts) -> int:
        each = [demand(first, last) for first, last in pairwise([0, *cuts, len(saved)])]
        now, most = 0, 0
        for stage, what, _ in order:
            nbytes = each[stage].saved_bytes + each[stage].received_bytes
            now += nbytes if what is Pass.FORWARD else -nbytes
            most = max(most, now)
        return most

    even = balance(count, len(places), lambda stage, first, last: float(last - first), lambda place: 0.0)
    return cuts_holding_least(order, len(places), demand, even), even, held


@given(st.data(), st.integers(3, 9), st.integers(1, 5))
def test_no_other_place_of_one_cut_holds_less(data, size: int, microbatches: int) -> None:
    saved = data.draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
    crossing = data.draw(st.lists(st.integers(0, 20), min_size=size - 1, max_size=size - 1))
    found, _, held = cut(saved, crossing, 2, microbatches)
    least = min(held([place]) for place in range(1, size))
    assert held(found) <= least + 0.02 * sum(saved)


@given(st.data(), st.integers(4, 8), st.integers(3, 4), st.sampled_from([gpipe, one_forward_one_backward]))
def test_never_more_than_even_stages_hold(data, size: int, count: int, make) -> None:
    saved = data.draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
    crossing = data.draw(st.lists(st.integers(0, 20), min_size=size - 1, max_size=size - 1))
    found, even, held = cut(saved, crossing, count, 4, make)
    assert tuple(found) in combinations(range(1, size), count - 1)
    assert held(found) <= held(even) + 0.02 * sum(saved)


def test_early_stages_are_small_where_they_hold_more() -> None:
    """Of four equal stages the first holds four micro-batches, and moving one cut alone gains nothing."""
    found, _, held = cut([10] * 8, [1] * 7, 4, 8)
    assert held(found) < held([2, 4, 6])
    assert found[0] == 1


def test_even_where_that_holds_no_more() -> None:
    found, even, _ = cut([10] * 8, [1] * 7, 2, 1)
    assert found == even == [4]
