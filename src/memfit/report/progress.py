"""Progress bars for the callback `(stage, done, total)`, which planning and measuring call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["progress_bars"]


@contextmanager
def progress_bars(*, enabled: bool | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Shows one bar for each stage on stderr while the block runs; the bars vanish at its end.

    Args:
        enabled: None shows them if stderr is a terminal; otherwise nothing is written.

    Yields:
        The callback.
    """
    if not (sys.stderr.isatty() if enabled is None else enabled):
        yield _silent
        return
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True, force_terminal=enabled), transient=True) as bars:

        def show(stage: str, done: int, total: int) -> None:
            name, _, _ = stage.partition(" (")  # the rest tells what was found so far
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            elif done == 0:
                bars.reset(tasks[name])
            bars.update(tasks[name], description=stage, completed=done, total=total)

        yield show


def _silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""
