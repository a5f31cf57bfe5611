"""The search for the least budget takes the time it is given, by a clock that each look at it moves on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memfit.ir.program import program_of
from memfit.planner.search.min_memory import least_order
from memfit.sim.simulator import simulate
from tests.planner.chains import chain


class Clock:
    """A fiftieth of a second later at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.02
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("min_memory", "spill_and_fill"):
        monkeypatch.setattr(f"memfit.planner.search.{module}.time", SimpleNamespace(monotonic=made))
    return made


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("enough_bytes", [0, 1])
def test_it_obeys_the_seconds_it_is_given(clock: Clock, seconds: float, enough_bytes: int) -> None:
    asked = max(1.0, 4 * seconds if enough_bytes else seconds)
    order = least_order(chain(60), seconds=seconds, enough_bytes=enough_bytes)
    # A target in flight stops at twice the time, and each of the others that look at once.
    assert 0.5 * asked < clock.now < 2 * asked + 0.4
    assert sorted(set(order)) == list(range(len(chain(60).ops)))


def test_more_time_finds_less(clock: Clock) -> None:
    graph = chain(60)
    short, long = (simulate(graph, program_of(graph, least_order(graph, seconds=s))).peak_bytes for s in (1.0, 15.0))
    assert long < short
