"""Code that runs on fake tensors is told, as in eager mode, that its tensors are no fake tensors.

A library may take another path when its tensors are fake: `transformers.utils.is_tracing(mask)` is true then, so the
library keeps a mask that eager mode drops after a look at its values, and another attention kernel runs. A step that
runs on fake tensors to count its memory must take eager mode's path. Where that path reads values, the step fails and
must be counted in another way.

The name `torch._subclasses.FakeTensor` is hidden: torch and memfit still find the class, and code of other packages
finds a class without instances.

Known limits: code that imports the class from `torch._subclasses.fake_tensor`, or has imported it before, still sees
it. The name is hidden in all threads.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from memfit.torch_compat.core import subclasses

__all__ = ["hidden_fake_tensors"]

_NAME = "FakeTensor"
_OWN = frozenset(("torch", "functorch", "memfit"))
"""Packages that find the class."""


class _NoTensor:
    """No tensor is an instance."""


@contextlib.contextmanager
def hidden_fake_tensors() -> Iterator[None]:
    """While active, code outside of torch does not see that a tensor is fake."""
    names = vars(subclasses)
    if _NAME not in names:  # hidden already
        yield
        return
    found = names.pop(_NAME)

    def attribute(name: str) -> Any:
        if name != _NAME:
            raise AttributeError(f"module {subclasses.__name__!r} has no attribute {name!r}")
        asking = str(sys._getframe(1).f_globals.get("__name__", ""))
        return found if asking.partition(".")[0] in _OWN else _NoTensor

    names["__getattr__"] = attribute
    try:
        yield
    finally:
        del names["__getattr__"]
        names[_NAME] = found
