"""The solver stops at counted work, and is silent."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from benchmarks.busy import busy
from memfit.planner.effort import Effort
from memfit.planner.solver import Milp, Status, solve


def hard_problem() -> Milp:
    """A knapsack with several rows, which takes many nodes."""
    rng = np.random.default_rng(0)
    problem = Milp()
    items = [problem.variable(cost=-float(rng.integers(10, 100))) for _ in range(60)]
    for _ in range(12):
        weights = rng.integers(5, 60, len(items))
        problem.row(dict(zip(items, map(float, weights), strict=True)), upper=float(weights.sum()) / 3)
    return problem


def test_a_solve_stops_at_the_same_point_each_time() -> None:
    efforts = [Effort(), Effort(), Effort()]
    first, second = (solve(hard_problem(), seconds=0.02, gap=0.0, effort=effort) for effort in efforts[:2])
    with busy():
        third = solve(hard_problem(), seconds=0.02, gap=0.0, effort=efforts[2])
    assert first.status is Status.FEASIBLE
    for other in (second, third):
        assert (other.status, other.objective, other.bound) == (first.status, first.objective, first.bound)
        assert np.array_equal(other.values, first.values)
    assert efforts[0].seconds == efforts[1].seconds == efforts[2].seconds > 0
    best = solve(hard_problem(), seconds=60.0, gap=0.0)
    assert best.status is Status.OPTIMAL and first.bound <= best.objective <= first.objective


def test_a_linear_program_stops_at_its_pivots() -> None:
    rng = np.random.default_rng(1)
    problem = Milp()
    items = [problem.variable(cost=-float(rng.random()), integer=False) for _ in range(400)]
    for _ in range(300):
        problem.row({i: float(rng.random()) for i in items}, upper=20.0)
    assert solve(problem, seconds=0.05).status is Status.UNKNOWN
    assert solve(problem, seconds=60.0).status is Status.OPTIMAL


@pytest.mark.parametrize("seconds", [1e6, float("inf")])
@pytest.mark.parametrize("integer", [False, True])
def test_a_small_program_may_have_any_limit(seconds: float, integer: bool) -> None:
    problem = Milp()
    first, second = (problem.variable(cost=-1.0, integer=integer) for _ in range(2))
    problem.row({first: 1.0, second: 1.0}, upper=1.0)
    solution = solve(problem, seconds=seconds)
    assert (solution.status, solution.objective) == (Status.OPTIMAL, -1.0)


def test_an_interrupt_ends_a_solve() -> None:
    """Python code runs while HiGHS solves, so the interrupt arrives there and must pass through it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            while True:
                solve(hard_problem(), seconds=60.0, gap=0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert solve(hard_problem(), seconds=0.02).status is Status.FEASIBLE


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.16.0 prints its version when it is made, before it is told not to; `pyproject.toml` excludes it."""
    assert solve(hard_problem(), seconds=0.02).status is Status.FEASIBLE
    assert capfd.readouterr() == ("", "")
