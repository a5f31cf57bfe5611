"""Import of an optional package at its first use, so that importing the zoo stays cheap."""

from __future__ import annotations

import importlib
from typing import Any

from memfit.errors import SpecError

__all__ = ["require"]


def require(module: str, *, extra: str) -> Any:
    """Imports a module that only some specs need.

    Args:
        module: its full name.
        extra: the extra of memfit that installs it.

    Raises:
        SpecError: if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SpecError(
            f"cannot import {module.partition('.')[0]} ({error}); install it with: pip install 'memfit[{extra}]'"
        ) from error
