"""The line of the user's code in a stack trace that also contains lines of torch and memfit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

__all__ = ["user_line"]


_HERE = str(Path(__file__).resolve().parent.parent) + os.sep


_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def user_line(stack_trace: str) -> str:
    """The innermost line outside torch and memfit of a stack trace, as `file:line`; `""` if there is none."""
    found = [(file, line) for file, line in _LINE.findall(stack_trace) if not file.startswith((_HERE, _TORCH, "<"))]
    return ":".join(found[-1]) if found else ""
