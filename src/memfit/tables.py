"""Tables of text cells, as text or on a terminal.

Results make their tables from `Sheet`s, which `memfit.report` shows in colour; a result that is printed is the same
tables without colour.

`rich` is imported when a table is written: its import draws from Python's random state, which `fit` leaves as it was.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "Sheet",
    "as_text",
    "bytes_cell",
    "extra_cell",
    "part_cell",
    "print_sheets",
    "reduction_cell",
    "seconds_cell",
    "text_console",
]

_WIDE = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table of text cells; also a result of its own, for tables that no other result type has.

    Attributes:
        title: text above the table.
        headers: headers of the columns.
        rows: cells of each row.
        left: columns of text, which are aligned to the left.
        rules: rows after which a line is drawn.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
    rules: frozenset[int] = frozenset()


def print_sheets(sheets: Iterable[Sheet], console: Console) -> None:
    """Writes tables to a console, except empty ones."""
    for sheet in sheets:
        if sheet.rows:
            console.print(sheet.title, style="bold", markup=False, highlight=False, soft_wrap=True)
            console.print(_rich(sheet))


def text_console(out: io.StringIO) -> Console:
    """A console that writes text without colour, as wide as necessary."""
    from rich.console import Console

    return Console(file=out, width=_WIDE, color_system=None, force_terminal=False)


def as_text(sheets: Iterable[Sheet]) -> str:
    """Tables as text without colour."""
    out = io.StringIO()
    print_sheets(sheets, text_console(out))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _rich(sheet: Sheet) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, header in enumerate(sheet.headers):
        table.add_column(header, justify="left" if index in sheet.left else "right", overflow="fold")
    for index, row in enumerate(sheet.rows):
        table.add_row(*_escaped(row), end_section=index in sheet.rules)
    return table


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("[", r"\[") for cell in cells]


def bytes_cell(nbytes: int | None) -> str:
    """Bytes; empty where unknown."""
    return "" if nbytes is None else format_bytes(nbytes)


def seconds_cell(seconds: float | None) -> str:
    """Seconds; empty where unknown."""
    return "" if seconds is None else format_seconds(seconds)


def reduction_cell(before: int | None, after: int | None) -> str:
    """Difference of bytes, and its share; empty where unknown."""
    if not before or after is None:
        return ""
    return f"{format_bytes(before - after)} {(before - after) / before * 100:.1f} %"


def extra_cell(before: float | None, after: float | None) -> str:
    """Difference of seconds, and its share; empty where unknown."""
    if not before or after is None:
        return ""
    return f"{format_seconds(after - before)} {format_percent(after / before - 1)}"


def part_cell(count: int, share: float, nbytes: int) -> str:
    """A number of items, their share, and their bytes."""
    return f"{count} ({share * 100:.1f} %) {format_bytes(nbytes)}"
