"""A process that does one job after the other, ended and begun anew where a job takes too long or the process dies.

So a benchmark over hundreds of models goes on after a crash in native code or a hang, and tells which model it was.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from importlib import import_module
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

__all__ = ["Died", "TookTooLong", "Worker"]


class Died(Exception):
    """The process ended in the middle of a job; says how."""


class TookTooLong(Exception):
    """A job was not done in time."""


class Worker:
    """A process that calls one function; use it in a `with` statement.

    Args:
        function: `package.module:name`; takes and returns what can be pickled.
        seconds: a job may take.
        most_jobs: after these the process begins anew, so that what libraries keep does not pile up.
    """

    def __init__(self, function: str, *, seconds: float, most_jobs: int = 40) -> None:
        self._function, self._seconds, self._most_jobs = function, seconds, most_jobs
        self._process: Any = None
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def call(self, job: Any) -> Any:
        """The function's result for one job.

        Raises:
            Died: if the process did.
            TookTooLong: if the job did.
        """
        if self._process is None or self._jobs >= self._most_jobs:
            self._end()
            self._begin()
        self._jobs += 1
        try:
            self._pipe.send(job)
            if not self._pipe.poll(self._seconds):
                self._end(busy=True)
                raise TookTooLong(f"more than {self._seconds:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self._end()
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            raise Died(f"the process ended: {how}") from None

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._function), daemon=True)
        self._process.start()
        other.close()
        self._jobs = 0

    def _end(self, *, busy: bool = False) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.join(0 if busy else 5)
            self._process.kill()
            self._process.join()
        self._process = None


def _serve(pipe: Connection, function: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    module, _, name = function.partition(":")
    call = getattr(import_module(module), name)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(call(job))
