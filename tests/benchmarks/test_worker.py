from __future__ import annotations

import os
import signal
import time

import pytest

from benchmarks.worker import Died, TookTooLong, Worker


def test_a_process_does_job_after_job() -> None:
    with Worker("math:sqrt", seconds=60, most_jobs=2) as worker:
        assert [worker.call(n) for n in (4, 9, 16)] == [2.0, 3.0, 4.0]


def test_a_process_that_dies_is_told_and_replaced() -> None:
    with Worker("os:getpgid", seconds=60) as worker:
        assert worker.call(0) > 0
        os.kill(worker._process.pid, signal.SIGSEGV)
        with pytest.raises(Died, match="SIGSEGV"):
            worker.call(0)
        assert worker.call(0) > 0


def test_a_job_that_takes_too_long_is_ended() -> None:
    begin = time.perf_counter()
    with Worker("time:sleep", seconds=3) as worker:
        with pytest.raises(TookTooLong, match="more than 3 s"):
            worker.call(100)
        assert worker.call(0.0) is None
    assert time.perf_counter() - begin < 60
