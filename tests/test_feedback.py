"""Progress that nobody asked for: silent for a second, then in the log or as a bar."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time

import pytest

from memfit.feedback import told_meanwhile


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def working(seconds: float) -> None:
    with told_meanwhile("Net", None) as tell:
        tell("profile", 3, 7)
        time.sleep(seconds)
    assert not any(thread.name == "memfit progress" for thread in threading.enumerate())


@pytest.fixture
def logged() -> object:
    """Lines of the log at level INFO."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("memfit.feedback")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_short_work_is_silent(logged: list[str]) -> None:
    working(0.1)
    assert not logged


def test_the_log_tells_within_two_seconds(logged: list[str]) -> None:
    working(1.5)
    assert logged == ["planning Net for 1 s: profile, 3 of 7"]


def test_a_terminal_shows_a_bar(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    working(1.5)
    assert "planning Net: profile" in terminal.getvalue() and not logged


def test_other_processes_than_the_first_are_silent(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    working(1.5)
    assert not logged


def test_who_gives_a_function_is_called(logged: list[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    with told_meanwhile("Net", lambda *state: seen.append(state)) as tell:
        tell("plan", 1, 2)
        time.sleep(1.2)
    assert seen == [("plan", 1, 2)] and not logged
