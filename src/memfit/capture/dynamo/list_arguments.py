"""Lets Dynamo pass an instance of a list's subclass to an op, as the list that it is.

Dynamo knows the elements of such lists, and breaks the graph where an op gets one, such as the axes that Keras keeps in
its layers: `torch.mean(x, axes)`. An op takes any sequence, so the elements are passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memfit.torch_compat.compiler import UserDefinedListVariable

__all__ = ["list_arguments"]


@contextlib.contextmanager
def list_arguments() -> Iterator[None]:
    """While active, ops in captured graphs take instances of subclasses of lists; calls may nest, also in threads."""
    before = vars(UserDefinedListVariable).get("as_proxy")
    UserDefinedListVariable.as_proxy = _elements
    try:
        yield
    finally:
        if before is None:
            with contextlib.suppress(AttributeError):  # another thread was here first
                del UserDefinedListVariable.as_proxy


def _elements(variable: Any) -> Any:
    of_release = vars(variable)
    return of_release["_base_vt" if "_base_vt" in of_release else "_list_vt"].as_proxy()
