"""Thirty training programs as people write them: losses and loops that are more than a model and a criterion.

Each is a generator function in one of the `scripts_*.py`, found by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from benchmarks.coverage.script import Script

__all__ = ["group", "names", "script"]

FILES = ("losses", "teachers", "adversaries", "loops")


def names() -> Iterator[str]:
    for file in FILES:
        module = _module(file)
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and callable(value):
                yield name


def group(name: str) -> str:
    return next(file for file in FILES if name in vars(_module(file)))


def script(name: str) -> Script:
    found: Script = vars(_module(group(name)))[name]
    return found


def _module(file: str) -> ModuleType:
    return import_module(f"benchmarks.coverage.scripts_{file}")
