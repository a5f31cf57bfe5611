"""Tells inner modules whether they run inside a call that memfit captures or runs by a plan.

A fitted module inside another fitted module is part of the outer step: where the outer module is captured or runs, the
plan of the inner module is not used. Outside such calls, Dynamo meets fitted modules only in code that others compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["in_own_call", "own_call"]

_INSIDE: ContextVar[bool] = ContextVar("memfit_own_call", default=False)


def in_own_call() -> bool:
    """Whether the current code runs inside a call that memfit captures or runs by a plan."""
    return _INSIDE.get()


@contextlib.contextmanager
def own_call() -> Iterator[None]:
    """While active, marks the current code as part of such a call."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)
