"""Cuts: the division found is the best one there is, and memory counts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.planner.pipeline.partition import CallCost, CutPlace, balance, demands, guessed_seconds


@given(st.lists(st.integers(1, 20), min_size=3, max_size=9), st.integers(1, 4), st.data())
def test_no_other_division_is_faster(times: list[int], count: int, data) -> None:
    count = min(count, len(times))
    crossing = [0, *(data.draw(st.integers(0, 3)) for _ in times[1:]), 0]

    def seconds(stage: int, first: int, last: int) -> float:
        return float(sum(times[first:last]))

    def value(cuts: tuple[int, ...]) -> tuple[float, float]:
        ends = [0, *cuts, len(times)]
        each = [
            seconds(0, first, last) + (crossing[last] if last < len(times) else 0) for first, last in pairwise(ends)
        ]
        return max(each), sum(each)

    found = balance(count, len(times) + 1, seconds, lambda place: float(crossing[place]))
    assert found is not None
    assert value(tuple(found))[0] == min(value(cuts)[0] for cuts in combinations(range(1, len(times)), count - 1))


def test_what_cannot_be_divided_is_told() -> None:
    assert balance(3, 3, lambda *_: 1.0, lambda _: 0.0) is None
    assert balance(2, 4, lambda *_: float("inf"), lambda _: 0.0) is None


def test_a_stage_counts_a_parameter_once() -> None:
    calls = [CallCost(states=frozenset({"w"}), saved_bytes=5), CallCost(states=frozenset({"w", "b"}), widest_bytes=9)]
    places = [CutPlace(position=0, nbytes=0), CutPlace(position=1, nbytes=7), CutPlace(position=2, nbytes=0)]
    demand = demands(calls, places, {"w": 100, "b": 1})
    assert demand(0, 2).static_bytes == 101
    assert (demand(1, 2).received_bytes, demand(1, 2).widest_bytes, demand(0, 1).saved_bytes) == (7, 9, 5)


def test_where_sums_are_to_be_in_order_only_the_last_stage_of_a_parameter_uses_it_twice() -> None:
    uses = ["w", "", "w", "w", "v", "w", "v"]
    calls = [CallCost(backward_seconds=1.0, states=frozenset({name} - {""})) for name in uses]
    places = [CutPlace(position=place, nbytes=0) for place in range(8)]
    free, ordered = (demands(calls, places, {"w": 1, "v": 1}, in_order=names) for names in ((), ("w", "v")))
    assert all(free(first, last).may_be_stage for first, last in combinations(range(8), 2))
    fit = {(first, last) for first, last in combinations(range(8), 2) if ordered(first, last).may_be_stage}
    assert {(0, 2), (1, 3), (3, 5), (0, 7), (2, 6), (2, 7), (4, 7)} <= fit
    assert fit.isdisjoint({(0, 3), (2, 4), (1, 5), (0, 5)})


def test_less_memory_costs_more_until_nothing_fits() -> None:
    calls = [CallCost(forward_seconds=1.0, backward_seconds=2.0, saved_bytes=100, widest_bytes=20)]
    places = [CutPlace(position=0, nbytes=0), CutPlace(position=1, nbytes=0)]
    demand = demands(calls, places, {})(0, 1)
    guesses = [guessed_seconds(demand, budget, 2) for budget in (None, 220, 150, 20, 19)]
    assert guesses[0] == guesses[1] == pytest.approx(3.0)
    assert guesses[1] < guesses[2] < guesses[3] == pytest.approx(4.0)
    assert guesses[4] == float("inf")


def test_a_stage_without_a_backward_pass_is_none() -> None:
    calls = [CallCost(forward_seconds=1.0), CallCost(forward_seconds=1.0, backward_seconds=1.0)]
    places = [CutPlace(position=place, nbytes=0) for place in range(3)]
    demand = demands(calls, places, {})
    assert guessed_seconds(demand(0, 1), None, 1) == float("inf")
    assert guessed_seconds(demand(0, 2), None, 1) == pytest.approx(3.0)
