"""A benchmark's tables: printed row by row as Markdown, and written into its README between two markers.

Rows are named by their first cells. A run that measures some of the rows again replaces these and keeps the others,
as long as the columns are the same; a run that is cut short leaves the rows it had.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import memfit

__all__ = ["MARKER", "Report", "Table", "environment"]

MARKER = "<!-- table -->"


@dataclass(slots=True)
class Table:
    """One table of a report.

    Attributes:
        title: above the table.
        columns: headers.
        keys: how many leading cells name a row.
        rows: by these cells.
    """

    title: str
    columns: tuple[str, ...]
    keys: int
    rows: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def markdown(self, environment: str) -> str:
        """The whole table, with a line about where it was measured last."""
        lines = [f"### {self.title}", "", environment, "", _row(self.columns), _row(["---"] * len(self.columns))]
        return "\n".join([*lines, *(_row(cells) for cells in self.rows.values())])


class Report:
    """The tables of one benchmark.

    Args:
        readme: what `--write` writes to; its markers must be there.
        write: whether to write.
        device: where the benchmark runs.
    """

    def __init__(self, readme: Path, *, write: bool, device: torch.device) -> None:
        self._readme = readme if write else None
        self._environment = environment(device)
        self._tables: dict[str, Table] = {}
        self._printed = ""
        print(f"{self._environment}", flush=True)

    def table(self, title: str, columns: Sequence[str], *, keys: int = 1) -> Table:
        """A table to add rows to, with the rows of it that the README already has."""
        table = Table(title, tuple(columns), keys)
        if self._readme is not None:
            table.rows = _rows_in(self._readme.read_text(), table)
        self._tables[title] = table
        return table

    def add(self, table: Table, *cells: object) -> None:
        """Prints one row, and writes the README if asked to."""
        row = tuple(str(cell) for cell in cells)
        assert len(row) == len(table.columns), f"{table.title}: {len(row)} cells for {len(table.columns)} columns"
        table.rows[row[: table.keys]] = row
        if self._printed != table.title:
            print(f"\n### {table.title}\n\n{_row(table.columns)}\n{_row(['---'] * len(row))}")
            self._printed = table.title
        print(_row(row), flush=True)
        if self._readme is not None:
            before, between, after = self._readme.read_text().split(MARKER)
            tables = _tables_in(between)
            made = {t.title: t.markdown(self._environment) for t in self._tables.values() if t.rows}
            body = "\n\n".join((tables | made).values())
            self._readme.write_text(f"{before}{MARKER}\n\n{body}\n\n{MARKER}{after}")


def environment(device: torch.device) -> str:
    """Versions, machine kind and date in one line."""
    names = ", ".join(
        f"{name} {found}"
        for name in ("torch", "torchvision", "timm", "transformers", "memfit")
        if (found := _version(name))
    )
    return (
        f"{date.today().isoformat()} · Python {platform.python_version()}, {names} · {_machine(device)}, "
        f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    )


def _version(package: str) -> str:
    if package in ("torch", "memfit"):
        return str({"torch": torch, "memfit": memfit}[package].__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    kind = " ".join(name.split()[:2])
    return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU, {kind}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _tables_in(text: str) -> dict[str, str]:
    """The tables of a README as they are, by title; what stands above all of them goes below each title."""
    above, *tables = text.split("### ")
    found: dict[str, str] = {}
    for table in tables:
        title, _, rest = table.partition("\n")
        rest = rest.strip()
        found[title] = f"### {title}\n\n" + (f"{above.strip()}\n\n{rest}" if rest.startswith("|") else rest)
    return found


def _rows_in(text: str, table: Table) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Rows of a table that stand in a README, if it has the same columns."""
    _, found, rest = text.partition(f"### {table.title}\n")
    lines = [line for line in rest.partition("###")[0].partition(MARKER)[0].splitlines() if line.startswith("|")]
    if not found or not lines or lines[0] != _row(table.columns):
        return {}
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]
    return {row[: table.keys]: row for row in rows}
