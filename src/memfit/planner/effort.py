"""Search effort: searches are limited by the work that they do, not by the clock.

Problem: a search that stops by the clock finds other plans on a slow or busy machine, and may miss a budget that it
reached before. The known technique is a deterministic measure of work: ticks of CPLEX, work units of Gurobi.

Idea: each part of a search charges its work to a counter: ops that it simulates, pivots of its solver. The work is
stated in nominal seconds, which are about the seconds it takes on one free core. The same step, budget and costs then
give the same plan, on every machine. The clock is an outer limit only: a search that takes several times its nominal
seconds is stopped (`clock_limit`), so that nobody waits without end on a busy machine.

Limits: nominal seconds are rough, within a factor of two on most steps. Solvers round differently on machines with
other vector units, so a plan may still differ there in rare cases.
"""

from __future__ import annotations

import os
import time

from memfit.errors import SpecError

__all__ = ["Effort", "clock_limit", "search_limit"]

_CLOCK_FACTOR, _CLOCK_SECONDS = 5.0, 1.0
"""Seconds by the clock after which a search stops: multiples of its nominal seconds, and more for a short search."""

_SECONDS_PER_OP = 25e-6
"""Nominal seconds to build and simulate a program, for each op of its order."""

_VARIABLE = "MEMFIT_SEARCH_SECONDS"


def clock_limit(seconds: float) -> float:
    """The seconds by the clock after which a search of some nominal seconds stops."""
    return _CLOCK_SECONDS + _CLOCK_FACTOR * seconds


def search_limit(seconds: float) -> float:
    """The nominal seconds of a search: `seconds`, or less if the variable `MEMFIT_SEARCH_SECONDS` says so.

    Raises:
        SpecError: if the variable is not a number from zero on.
    """
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return seconds
    try:
        most = float(text)
    except ValueError:
        most = -1.0
    if not most >= 0:
        raise SpecError(f"the environment variable {_VARIABLE} is {text!r}; it is a number of seconds, or not set")
    return min(seconds, most)


class Effort:
    """The work that a search and its parts have done.

    Attributes:
        seconds: the work so far, in nominal seconds.
    """

    __slots__ = ("_begin", "_charged", "_whole", "seconds")

    def __init__(self, whole: Effort | None = None) -> None:
        """Starts at no work.

        Args:
            whole: the counter of a search of which this is a part; it counts this work too.
        """
        self.seconds = 0.0
        self._whole = whole
        self._charged: set[object] = set()
        self._begin = time.monotonic()

    def charge(self, seconds: float) -> None:
        """Counts work in nominal seconds."""
        self.seconds += seconds
        if self._whole is not None:
            self._whole.charge(seconds)

    def charge_ops(self, ops: float) -> None:
        """Counts a number of ops whose programs are built and simulated."""
        self.charge(ops * _SECONDS_PER_OP)

    def charge_once(self, key: object, seconds: float) -> None:
        """Counts work whose result is cached, the first time only; so it does not matter who filled the cache."""
        if key not in self._charged:
            self._charged.add(key)
            self.charge(seconds)

    def exceeds(self, seconds: float) -> bool:
        """Whether more work than some nominal seconds has been done, or far too much time has passed."""
        return self.seconds > seconds or time.monotonic() - self._begin > clock_limit(seconds)
