"""Bytes and durations in the notation that people use. `8GiB` is 8·2³⁰ bytes, `8GB` is 8·10⁹."""

from __future__ import annotations

import re
from fractions import Fraction

from memfit.errors import SpecError

__all__ = ["format_bytes", "format_percent", "format_seconds", "parse_bytes"]

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]+|%)?\s*")


def parse_bytes(text: str | int, *, whole_bytes: int | None = None) -> int:
    """Reads an amount of memory.

    Args:
        text: an integer, or a string such as `"8GiB"`, `"8GB"`, `"512 MiB"`, `"60%"`.
        whole_bytes: the bytes that a percentage refers to.

    Returns:
        Bytes, more than zero.

    Raises:
        SpecError: if `text` is not an amount of memory, or not positive.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise SpecError(f"a budget is bytes or a string such as '8GiB' or '60%' (budget: {text!r})")
    if isinstance(text, int):
        amount = text
    else:
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise SpecError(f"cannot read the budget; write bytes, '8GiB', '8GB' or '60%' (budget: {text!r})")
        number, unit = match.groups()
        if unit == "%":
            if whole_bytes is None:
                raise SpecError(f"a percentage needs a device whose memory is known (budget: {text!r})")
            amount = int(Fraction(number) / 100 * whole_bytes)
        else:
            factor = _UNITS.get((unit or "b").lower())
            if factor is None:
                raise SpecError(
                    f"unknown unit {unit!r}; known: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, % (budget: {text!r})"
                )
            amount = int(Fraction(number) * factor)
    if amount <= 0:
        raise SpecError(f"a budget is more than zero bytes (budget: {text!r})")
    return amount


def format_bytes(nbytes: float) -> str:
    """Formats bytes in binary units, with enough digits to tell two plans apart."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}" if unit == "GiB" else f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Formats a duration in seconds, milliseconds or microseconds."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def format_percent(fraction: float) -> str:
    """A signed percentage: `+6.2 %`."""
    return f"{fraction * 100:+.1f} %"
