"""Leaves a model's logging calls out of captured graphs, so that they do not break its graph.

Dynamo breaks the graph at a call of a logger. Most messages of models are logged once (`logger.warning_once` of
transformers), and steps that ran before the capture have logged them, so captured graphs leave these calls out. A
pipeline needs one graph, so its graphs leave out all logger calls and `warnings.warn`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

from memfit.torch_compat.compiler import dynamo_config

__all__ = ["logs_left_out"]

_LEVELS = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")


class _Functions(set[object]):
    """A set of functions that iterates over their names.

    PyTorch records its options with each compilation, sorted and as JSON. Version 2.11 also records these functions,
    and told the user at each compilation that functions cannot be sorted.
    """

    def __iter__(self) -> Iterator[object]:
        return iter(sorted(getattr(f, "__qualname__", repr(f)) for f in set(self)))


def logs_left_out(*, all_calls: bool = False) -> dict[str, Any]:
    """Dynamo options (for `config.patch`) that leave out calls that log once, or all logging calls."""
    methods = vars(logging.Logger)
    names = [name for name in methods if name.endswith("_once")]
    left_out = _Functions(methods[name] for name in (*names, *(_LEVELS if all_calls else ())))
    config = dynamo_config
    option = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
    left_out.update(getattr(config, option), (warnings.warn,) if all_calls else ())
    return {option: left_out}
