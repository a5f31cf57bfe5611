"""Leaves a model's logging calls out of captured graphs, so that they do not break its graph.

Dynamo breaks the graph at a call of a logger. Messages of models are mostly told once (`logger.warning_once` of
transformers), and the steps that capture ran before have told them; these calls are left out of captured graphs. A
pipeline needs one graph, so there all calls of loggers are, and `warnings.warn`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["logs_left_out"]

_LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")


class _Functions(set[object]):
    """Functions, which go over as their names.

    PyTorch records its options with each compilation, sorted and as JSON; 2.11 does so with these too, and told the
    user at each that functions cannot be sorted.
    """

    def __iter__(self) -> Iterator[object]:
        return iter(sorted(getattr(f, "__qualname__", repr(f)) for f in set(self)))


def logs_left_out(*, all_calls: bool = False) -> dict[str, Any]:
    """Options of Dynamo's (`config.patch`) with which it leaves out calls that log once, or all that log."""
    methods = vars(logging.Logger)
    names = [name for name in methods if name.endswith("_once")]
    left_out = _Functions(methods[name] for name in (*names, *(_LEVELS if all_calls else ())))
    config = torch._dynamo.config
    option = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
    left_out.update(getattr(config, option), (warnings.warn,) if all_calls else ())
    return {option: left_out}
