"""Types of fields of records, with the values that are allowed in files.

Records of this package are structs of `msgspec`, which validates them against these types when it reads a file. Code
that makes a record is checked by mypy only.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = [
    "MOST_ITEMS",
    "NO_CONTROL_CHARACTERS",
    "Budget",
    "Bytes",
    "Count",
    "Fact",
    "Fraction",
    "Index",
    "Indices",
    "ListOfBytes",
    "Name",
    "Number",
    "Rate",
    "Seconds",
    "Words",
]

NO_CONTROL_CHARACTERS = r"^(?![\s\S]*[\x00-\x08\x0b-\x1f\x7f-\x9f])"

MOST_ITEMS = Meta(max_length=1_000_000)
"""The largest number of items of a list in a file."""

Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Budget = Annotated[int, Meta(ge=1, le=2**60)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Index = Annotated[int, Meta(ge=0, le=2**31)]
Indices = Annotated[tuple[Index, ...], MOST_ITEMS]
ListOfBytes = Annotated[tuple[Bytes, ...], MOST_ITEMS]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=-1, le=1e9)]
Rate = Annotated[float, Meta(ge=1, le=1e15)]
"""Bytes in a second."""

Number = Annotated[float, Meta(ge=-1e6, le=1e6)]

Name = Annotated[str, Meta(max_length=1000, pattern=NO_CONTROL_CHARACTERS)]
Words = Annotated[str, Meta(max_length=100_000, pattern=NO_CONTROL_CHARACTERS)]

_Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_FewItems = Meta(max_length=100_000)
_Leaves = Annotated[list[Words | _Integer | bool], _FewItems]
Fact = Words | _Integer | bool | Annotated[list[Words | _Integer | bool | _Leaves], _FewItems]
"""A fact that a plan is for, such as a version, or shapes of inputs."""
