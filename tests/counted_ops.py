"""A dispatch mode that counts the ops that it is given."""

from __future__ import annotations

from collections import Counter
from typing import Any

from memfit.torch_compat.core import TorchDispatchMode

__all__ = ["CountedOps"]


class CountedOps(TorchDispatchMode):
    """Counts calls by op while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))
