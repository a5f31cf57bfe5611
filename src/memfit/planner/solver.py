"""Mixed-integer programs, solved by HiGHS behind one small interface.

A status other than optimal is a value, not an exception: the incumbent and the bound are returned as they are, and the
caller checks the result with the simulator. The caller also scales bytes, so that coefficients stay within a few orders
of magnitude.

Limits are nominal seconds (`memfit.planner.effort`), so a solve ends at the same point on every machine. A linear
program is limited by its pivots. HiGHS does not say how many pivots a mixed-integer solve has done, but it asks at
fixed points of its search whether to go on, and these questions are counted.

Source: HiGHS, https://highs.dev, through `highspy`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import highspy
import numpy as np
from numpy.typing import NDArray

from memfit.planner.effort import Effort, clock_limit

__all__ = ["Milp", "Solution", "Status", "solve"]


_FEASIBLE_POINT = 2
"""HiGHS's `SolutionStatus.kSolutionStatusFeasible`."""

_START_SECONDS, _START_SECONDS_PER_TERM = 1e-3, 1e-5
"""Nominal seconds to build and presolve a program: fixed, and for each coefficient that is not zero."""

_LINEAR_PIVOT_SECONDS = 4e-9
"""Nominal seconds of a pivot of a linear program, for each coefficient that is not zero."""

_MOST_PIVOTS = 2**31 - 1
"""The largest limit of pivots that HiGHS takes."""

_INTEGER_PIVOT_SECONDS = 1e-7
"""Nominal seconds of a pivot of a mixed-integer program, with its cuts and heuristics, for each such coefficient."""

_ROOT_SECONDS, _TREE_SECONDS = 6e-6, 6e-7
"""Nominal seconds between two questions of HiGHS whether to go on, for each coefficient that is not zero: at the root
with its cuts and heuristics, and at the other nodes."""


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Values of the variables (empty without an incumbent), their cost, and a proven lower bound of it."""

    status: Status
    values: NDArray[np.float64]
    objective: float
    bound: float


@dataclass(slots=True)
class Milp:
    """Minimise a cost over bounded variables under rows `lower <= sum(coefficient * variable) <= upper`."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)

    def variable(self, *, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """Adds a variable and returns its index."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], *, lower: float = -np.inf, upper: float = np.inf) -> None:
        """Adds a row."""
        self.indices.extend(terms)
        self.coefficients.extend(terms.values())
        self.starts.append(len(self.indices))
        self.row_lower.append(lower)
        self.row_upper.append(upper)


def solve(
    problem: Milp, *, seconds: float, gap: float = 1e-3, dive: bool = False, effort: Effort | None = None
) -> Solution:
    """Solves a program.

    Args:
        problem: the program to solve.
        seconds: limit in nominal seconds.
        gap: relative gap at which to stop.
        dive: whether to search for a first point by rounding relaxations. This takes a fraction of a second and keeps
            the solver from ending a short solve with a poor point.
        effort: counts the work.

    Returns:
        The best point found and a bound.
    """
    own = Effort(effort)
    start = _dive(problem, seconds / 3, own) if dive else None
    engine = _engine(problem, integer=True)
    _limit(engine, problem, seconds - own.seconds)
    engine.setOptionValue("mip_rel_gap", gap)
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = list(start)
        engine.setSolution(point)
    engine.run()
    _charge(engine, problem, own)
    return _solution(engine)


def _limit(engine: highspy.Highs, problem: Milp, seconds: float) -> None:
    """Limits a solve to nominal seconds."""
    terms = max(1, len(problem.indices))
    engine.setOptionValue("time_limit", clock_limit(max(0.0, seconds)))
    if not any(problem.integer):
        pivots = seconds / (_LINEAR_PIVOT_SECONDS * terms)
        engine.setOptionValue("simplex_iteration_limit", int(min(max(100.0, pivots), _MOST_PIVOTS)))
        return
    left = seconds / terms

    def ask(event: highspy.HighsCallbackEvent) -> None:
        nonlocal left
        left -= _TREE_SECONDS if event.data_out.mip_node_count > 0 else _ROOT_SECONDS
        if left < 0:
            event.interrupt()

    engine.cbMipInterrupt += ask


def _charge(engine: highspy.Highs, problem: Milp, effort: Effort) -> None:
    """Counts the work of a solve."""
    terms = len(problem.indices)
    a_pivot = (_INTEGER_PIVOT_SECONDS if any(problem.integer) else _LINEAR_PIVOT_SECONDS) * terms
    pivots = max(0, engine.getInfo().simplex_iteration_count)
    effort.charge(_START_SECONDS + _START_SECONDS_PER_TERM * terms + a_pivot * pivots)


def _engine(problem: Milp, *, integer: bool) -> highspy.Highs:
    lp = highspy.HighsLp()
    lp.num_col_ = len(problem.cost)
    lp.num_row_ = len(problem.row_lower)
    lp.col_cost_ = np.array(problem.cost)
    lp.col_lower_ = np.array(problem.lower)
    lp.col_upper_ = np.array(problem.upper)
    lp.row_lower_ = np.array(problem.row_lower)
    lp.row_upper_ = np.array(problem.row_upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(problem.starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(problem.indices, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(problem.coefficients)
    if integer:
        kind = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kind[int(flag)] for flag in problem.integer]
    engine = highspy.Highs()
    engine.setOptionValue("output_flag", False)
    engine.setOptionValue("threads", 1)
    engine.passModel(lp)
    return engine


def _dive(problem: Milp, seconds: float, effort: Effort) -> NDArray[np.float64] | None:
    """Rounds the relaxation step by step and solves again after each step; None if this finds no point."""
    engine = _engine(problem, integer=False)
    limit = effort.seconds + seconds
    free = [i for i, flag in enumerate(problem.integer) if flag and problem.lower[i] < problem.upper[i]]
    values = _relaxed(engine, problem, effort)
    while not effort.exceeds(limit):
        if values is None:
            return None
        fractional = [i for i in free if 1e-6 < values[i] < 1 - 1e-6]
        fractional = [fractional[i] for i in np.argsort(-values[fractional])]
        if not fractional:
            return values
        likely = [i for i in fractional[: max(1, len(fractional) // 4)] if values[i] >= 0.5] or fractional[:1]
        batch = dict.fromkeys(likely, 1.0) | {i: 0.0 for i in fractional if values[i] < 0.1}
        values = _fixed(engine, problem, batch, effort)
        if values is None:
            batch = {fractional[0]: 1.0}
            values = _fixed(engine, problem, batch, effort)
        if values is None:
            batch = {fractional[0]: 0.0}
            values = _fixed(engine, problem, batch, effort)
        free = [i for i in free if i not in batch]
    return None


def _fixed(engine: highspy.Highs, problem: Milp, batch: dict[int, float], effort: Effort) -> NDArray[np.float64] | None:
    """Fixes variables and solves; frees them again if that is infeasible."""
    for i, value in batch.items():
        engine.changeColBounds(i, value, value)
    values = _relaxed(engine, problem, effort)
    if values is None:
        for i in batch:
            engine.changeColBounds(i, problem.lower[i], problem.upper[i])
    return values


def _relaxed(engine: highspy.Highs, problem: Milp, effort: Effort) -> NDArray[np.float64] | None:
    engine.run()
    effort.charge(_LINEAR_PIVOT_SECONDS * len(problem.indices) * max(0, engine.getInfo().simplex_iteration_count))
    if engine.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return np.array(engine.getSolution().col_value)


def _solution(engine: highspy.Highs) -> Solution:
    status, info = engine.getModelStatus(), engine.getInfo()
    none = np.zeros(0)
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solution(status=Status.INFEASIBLE, values=none, objective=np.inf, bound=np.inf)
    values = np.array(engine.getSolution().col_value)
    optimal = status == highspy.HighsModelStatus.kOptimal
    bound = float(info.mip_dual_bound)
    if info.primal_solution_status != _FEASIBLE_POINT or not len(values):
        return Solution(status=Status.UNKNOWN, values=none, objective=np.inf, bound=bound)
    objective = float(info.objective_function_value)
    return Solution(
        status=Status.OPTIMAL if optimal else Status.FEASIBLE, values=values, objective=objective, bound=bound
    )
