"""Tells how far planning is, without being asked: as a bar on a terminal, else in the log.

Planning a large model takes a minute, and a process that says nothing seems to hang. So a thread tells the stage and
the share done, from one second on and every two seconds; plans that take less than a second stay silent.

Known limits: of several processes only the first one tells; Jupyter is no terminal, so the log tells there.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Progress", "told_meanwhile"]

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with the name of the phase, the amount of work done and the total amount."""

_SILENT_SECONDS = 1.0
_LOGGED_SECONDS = 2.0
_DRAWN_SECONDS = 0.2


@dataclass(slots=True)
class _State:
    """How far the work is.

    Attributes:
        name: what is planned.
        stage: the present phase.
        done: amount of work done in it.
        total: amount of work in it.
        begin: when the work began.
        ended: is set when the work ends.
    """

    name: str
    stage: str = "start"
    done: int = 0
    total: int = 1
    begin: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)

    def note(self, stage: str, done: int, total: int) -> None:
        """Notes the progress."""
        self.stage, self.done, self.total = stage, done, total


@contextmanager
def told_meanwhile(name: str, progress: Progress | None) -> Iterator[Progress]:
    """While the block runs, its progress is told; yields the function that it calls with its progress.

    Args:
        name: what the block plans, for people.
        progress: is called instead, if it is given.
    """
    if progress is not None:
        yield progress
        return
    state = _State(name)
    if os.environ.get("RANK", "0") != "0":
        yield state.note
        return
    tell = _draw if sys.stderr.isatty() else _log
    teller = threading.Thread(target=_tell, args=(state, tell), name="memfit progress", daemon=True)
    teller.start()
    try:
        yield state.note
    finally:
        state.ended.set()
        teller.join()


def _tell(state: _State, tell: Callable[[_State], None]) -> None:
    if not state.ended.wait(_SILENT_SECONDS):
        tell(state)


def _log(state: _State) -> None:
    while True:
        seconds = time.monotonic() - state.begin
        log.info("planning %s for %.0f s: %s, %d of %d", state.name, seconds, state.stage, state.done, state.total)
        if state.ended.wait(_LOGGED_SECONDS):
            return


def _draw(state: _State) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("planning {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(state.name, total=1)
        while True:
            bars.update(
                task, description=f"{state.name}: {state.stage}", completed=state.done, total=max(1, state.total)
            )
            if state.ended.wait(_DRAWN_SECONDS):
                return
