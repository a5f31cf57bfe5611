"""Whether a module's call is one that memfit captures or runs by a plan, to the modules within it.

A fitted module inside another fitted module is part of the outer step: where the outer one is captured or runs, the
inner one's plan is not asked. Outside of such calls Dynamo meets fitted modules only in code that others compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["in_own_call", "own_call"]

_INSIDE: ContextVar[bool] = ContextVar("memfit_own_call", default=False)


def in_own_call() -> bool:
    """Whether this runs inside a call that memfit captures or runs by a plan."""
    return _INSIDE.get()


@contextlib.contextmanager
def own_call() -> Iterator[None]:
    """Marks what runs inside as such a call."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)
