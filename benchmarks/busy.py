"""A machine that does other work at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy"]


@contextmanager
def busy() -> Iterator[None]:
    """A machine on which another thread takes about half of the time."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
