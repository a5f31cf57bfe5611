"""The peak of the process's resident set, which is what the machine's memory sees.

Linux keeps the peak (`VmHWM`) and sets it back to the present size on request, so nothing has to be sampled. What
malloc holds of freed memory would count; it is told to give that back before.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

__all__ = ["resident_growth"]

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def resident_growth(run: Callable[[], object]) -> int:
    """How much larger the resident set gets while something runs, in bytes, at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _bytes("VmRSS")
    run()
    return _bytes("VmHWM") - before


def _bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")
