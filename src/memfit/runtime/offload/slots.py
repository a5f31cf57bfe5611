"""Allocation of a tier's space to steps, within a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from memfit.errors import SwapError
from memfit.ir.tiers import Tier, slot_bytes
from memfit.units import format_bytes

__all__ = ["Places"]


class Places:
    """The places of steps in flight; places of finished steps are reused.

    Attributes:
        reserved_bytes: bytes that steps hold now.
    """

    def __init__(self, tier: Tier, limit_bytes: int | None, extend: Callable[[int, int], int]) -> None:
        """Begins with no place.

        Args:
            tier: the tier, which the error names when it is full.
            limit_bytes: limit for all steps together; None for no limit.
            extend: takes the end of the present places and a size, makes room, and returns the offset of the room.
        """
        self.reserved_bytes = 0
        self._tier = tier
        self._limit_bytes = limit_bytes
        self._extend = extend
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._end = 0

    def reserve(self, nbytes: int) -> int:
        """Takes a place.

        Returns:
            The offset where the place begins.

        Raises:
            SwapError: if the place exceeds the limit, or there is no room.
        """
        size = slot_bytes(nbytes)
        with self._lock:
            if self._limit_bytes is not None and self.reserved_bytes + size > self._limit_bytes:
                raise SwapError(
                    f"{format_bytes(size)} more are to be swapped to the {self._tier}, which may hold "
                    f"{format_bytes(self._limit_bytes)} and holds {format_bytes(self.reserved_bytes)} for steps whose "
                    "backward pass has not run; run it, drop their outputs, or raise the limit"
                )
            known = self._free.get(size)
            if known:
                offset = known.pop()
            else:
                offset = self._extend(self._end, size)
                self._end = offset + size
            self.reserved_bytes += size
            return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Gives a place back."""
        size = slot_bytes(nbytes)
        with self._lock:
            self._free.setdefault(size, []).append(offset)
            self.reserved_bytes -= size
