"""Results as tables for people: in colour on a terminal, otherwise as plain text.

Predicted and measured values are side by side, and each is marked.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from rich import box
from rich.console import Console
from rich.table import Table

from memfit.compiler.plan import Plan
from memfit.ir.plan_file import Prediction
from memfit.report.records import csv_text, json_text
from memfit.tools.compare import BatchSize, Comparison, Row
from memfit.tools.compare_pipelines import PipelineComparison
from memfit.tools.estimate import Estimate
from memfit.tools.max_size import LargestSize
from memfit.tools.verify import Verification
from memfit.units import format_bytes, format_percent, format_seconds

__all__ = ["Sheet", "csv_text", "json_text", "plain_text", "show"]

_WIDE = 240
_MOST_MODULES = 10


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


def show(result: object, console: Console) -> None:
    """Writes a result to a console."""
    if isinstance(result, Plan):
        console.print(str(result), markup=False, highlight=False, soft_wrap=True)
        return
    for sheet in sheets(result):
        if sheet.rows:
            console.print(sheet.title, style="bold", markup=False, highlight=False, soft_wrap=True)
            console.print(_rich(sheet))


def plain_text(result: object) -> str:
    """A result as text without colour, as wide as necessary."""
    out = io.StringIO()
    show(result, Console(file=out, width=_WIDE, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


@singledispatch
def sheets(result: object) -> list[Sheet]:
    """The tables of a result."""
    raise TypeError(f"there is no table for {type(result).__name__}")


@sheets.register
def _(result: Sheet) -> list[Sheet]:
    return [result]


@sheets.register
def _(result: Comparison) -> list[Sheet]:
    lines: list[tuple[str, ...]] = []
    rules: set[int] = set()
    swaps = any(row.out_bytes for row in result.rows)
    for row in result.rows:
        lines += [(*line, *more) if swaps else line for line, more in zip(_lines(row), _swaps(row), strict=False)]
        rules.add(len(lines) - 1)
    headers = (
        *("batch", "strategy", "budget", "", "peak\nbefore", "peak\nafter", "reduction", "step\nbefore", "step\nafter"),
        *("overhead", "bound", "recompute\ntime", "retained\nactivations", "recomputed\nactivations"),
        *(("swapped\nactivations", "out + in\nbytes", "on\ntiers", "beside\ncompute", "stalls") if swaps else ()),
    )
    title = f"compare  {result.label} · {result.device}"
    return [Sheet(title=title, headers=headers, rows=tuple(lines), left=frozenset({1, 3}), rules=frozenset(rules))]


def _lines(row: Row) -> list[tuple[str, ...]]:
    """Lines of a row of a comparison: predicted values, and measured values under them."""
    budget = "-" if row.budget_bytes is None else format_bytes(row.budget_bytes)
    head = (str(row.batch) if row.size is None else f"{row.batch} × {row.size}", row.strategy, budget)
    before, plain_seconds = format_bytes(row.plain_peak_bytes), format_seconds(row.plain_seconds)
    if row.error:
        least = f"least {format_bytes(row.least_bytes)}" if row.least_bytes else row.error
        return [(*head, "predicted", before, "does not fit", least, plain_seconds, *("",) * 6)]
    a = row.activations
    lines: list[tuple[str, ...]] = [
        (
            *(*head, "predicted", before, _bytes(row.peak_bytes), _reduction(row.plain_peak_bytes, row.peak_bytes)),
            *(plain_seconds, _seconds(row.seconds), _extra(row.plain_seconds, row.seconds)),
            "" if row.bound_overhead is None else format_percent(row.bound_overhead),
            _seconds(row.recompute_seconds),
            _part(a.retained, a.retained_share, a.retained_bytes) if a else "",
            _part(a.recomputed, a.recomputed_share, a.recomputed_bytes) if a else "",
        )
    ]
    if row.measured_peak_bytes is not None:
        lines.append(
            (
                *("", "", "", "measured", _bytes(row.measured_plain_peak_bytes), _bytes(row.measured_peak_bytes)),
                _reduction(row.measured_plain_peak_bytes, row.measured_peak_bytes),
                *(_seconds(row.measured_plain_seconds), _seconds(row.measured_seconds)),
                *(_extra(row.measured_plain_seconds, row.measured_seconds), *("",) * 4),
            )
        )
    return lines


def _swaps(row: Row) -> list[tuple[str, ...]]:
    """Cells of a row about swaps, if any row swaps: predicted values, and empty cells under them."""
    a, none = row.activations, ("",) * 5
    if not row.out_bytes or a is None:
        return [none, none]
    overlap = "" if row.overlap is None else f"{row.overlap:.0%}"
    moved = f"{format_bytes(row.out_bytes)} + {format_bytes(row.in_bytes)}"
    held = " + ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in _on_tiers(row))
    swapped = _part(a.swapped, a.swapped_share, a.swapped_bytes)
    return [(swapped, moved, held, overlap, _seconds(row.stall_seconds)), none]


@sheets.register
def _(result: Estimate) -> list[Sheet]:
    rows = [(kind, format_bytes(nbytes), _of(nbytes, result.peak)) for kind, nbytes in result.by_kind()]
    rows.append((f"peak, at {result.peak_at}", format_bytes(result.peak), ""))
    parts = Sheet(
        title=f"estimate  {result.label} ({result.basis})",
        headers=("what", "predicted", "of the peak"),
        rows=tuple(rows),
        rules=frozenset({len(rows) - 2}),
    )
    modules = [
        (name, format_bytes(nbytes), _of(nbytes, result.activations))
        for name, nbytes in result.by_module[:_MOST_MODULES]
    ]
    rest = result.by_module[_MOST_MODULES:]
    if rest:
        nbytes = sum(n for _, n in rest)
        modules.append((f"{len(rest)} more", format_bytes(nbytes), _of(nbytes, result.activations)))
    headers = ("module", "predicted", "of all")
    by_module = Sheet(title="activations at the peak, by module", headers=headers, rows=tuple(modules))
    return [parts, *_swapping(result.swapping), by_module]


def _swapping(found: Prediction | None) -> list[Sheet]:
    if found is None:
        return []
    rows = (
        ("peak of the device", format_bytes(found.peak_bytes)),
        *((f"peak on the {tier}", format_bytes(nbytes)) for tier, nbytes in _on_tiers(found)),
        ("moved out", format_bytes(found.out_bytes)),
        ("moved in", format_bytes(found.in_bytes)),
        ("beside compute", f"{found.overlap:.0%}"),
        ("compute waits", format_seconds(found.stall_seconds)),
    )
    return [Sheet(title="with all swapped that can be, ops by rooflines", headers=("what", "predicted"), rows=rows)]


@sheets.register
def _(result: BatchSize) -> list[Sheet]:
    budget = format_bytes(result.budget_bytes)
    rows = []
    for point in result.curve:
        marks = [
            m for m, b in (("largest plain", result.plain), ("largest planned", result.planned)) if b == point.batch
        ]
        overhead = "does not fit" if point.overhead is None else format_percent(point.overhead)
        cells = (format_bytes(point.plain_peak_bytes), format_bytes(point.least_peak_bytes), overhead)
        rows.append((str(point.batch), *cells, ", ".join(marks)))
    return [
        Sheet(
            title=f"max-batch  {result.label} · budget {budget} · strategy {result.strategy}",
            headers=("batch", "plain peak predicted", "least peak predicted", "overhead predicted", ""),
            rows=tuple(rows),
            left=frozenset({4}),
        )
    ]


@sheets.register
def _(result: LargestSize) -> list[Sheet]:
    marks = {result.plain: "largest plain"}
    marks[result.planned] = ", ".join(m for m in (marks.get(result.planned), "largest planned") if m)
    rows = tuple(
        (str(p.size), format_bytes(p.plain_peak_bytes), format_bytes(p.least_peak_bytes), marks.get(p.size, ""))
        for p in result.curve
    )
    return [
        Sheet(
            title=f"max-size  {result.label} · budget {format_bytes(result.budget_bytes)}",
            headers=("size", "plain peak predicted", "least budget predicted", ""),
            rows=rows,
            left=frozenset({3}),
        )
    ]


@sheets.register
def _(result: PipelineComparison) -> list[Sheet]:
    rows = tuple(
        (
            str(row.cell.num_stages),
            str(row.cell.num_microbatches),
            "on" if row.cell.checkpointed else "off",
            row.system,
            format_bytes(row.activation_bytes),
            format_bytes(row.total_bytes),
            " ".join(map(format_bytes, row.stage_bytes)),
            f"{row.forward_seconds:.3f}",
            f"{row.backward_seconds:.3f}",
            f"{row.samples_per_second:.1f}",
            f"{row.memfit_speedup:.2f}" if row.memfit_speedup else "",
            row.note,
        )
        for row in result.rows
    )
    last = frozenset(place for place, row in enumerate(result.rows[:-1]) if row.cell != result.rows[place + 1].cell)
    headers = ("K", "M", "checkpoint", "system", "activations", "total", "peak of each stage (predicted)")
    return [
        Sheet(
            title=f"pipelines  {result.label} · measured, all stages in one process",
            headers=(*headers, "forward s", "backward s", "samples/s", "memfit / it", "how"),
            rows=rows,
            left=frozenset({2, 3, 6, 11}),
            rules=last,
        )
    ]


@sheets.register
def _(result: Verification) -> list[Sheet]:
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(check.kind for check in result.checks):
        checks = [check for check in result.checks if check.kind == kind]
        different = [check for check in checks if not check.equal]
        worst = max(different, key=lambda check: check.max_difference, default=None)
        where = "" if worst is None else f"{worst.max_difference:.3g} ({worst.name}, step {worst.step})"
        equal = str(len(checks) - len(different))
        within = (str(sum(check.within_rounding for check in different)),) if result.plan.is_tiled else ()
        rows.append((kind, str(len(checks)), equal, *within, where))
    predicted = result.plan.predicted
    bits = Sheet(
        title=f"verify  {result.plan.label} · {result.steps} steps, plain against planned",
        headers=(
            *("what", "compared", "bitwise equal"),
            *(("equal up to rounding",) if result.plan.is_tiled else ()),
            "largest difference",
        ),
        rows=tuple(rows),
    )
    peaks = Sheet(
        title="peak of the whole step",
        headers=("", "predicted", "measured"),
        rows=(
            ("plain", format_bytes(predicted.plain_peak_bytes), format_bytes(result.plain_peak_bytes)),
            ("planned", format_bytes(predicted.peak_bytes), format_bytes(result.peak_bytes)),
            ("budget", format_bytes(result.plan.budget_bytes), ""),
        ),
    )
    return [bits, peaks, *_moved(result)]


def _moved(result: Verification) -> list[Sheet]:
    """Sheet with the bytes of swaps and of tiers; none if there were no swaps."""
    if not any(result.swapped_planned_bytes):
        return []
    predicted = result.plan.predicted
    ways = zip(("out", "in"), result.swapped_planned_bytes, result.swapped_executed_bytes, strict=True)
    rows = (
        *((f"moved {way}", format_bytes(planned), format_bytes(executed)) for way, planned, executed in ways),
        *((f"peak on the {tier}", format_bytes(nbytes), "") for tier, nbytes in _on_tiers(predicted)),
        ("beside compute", f"{predicted.overlap:.0%}", ""),
        ("compute waits", format_seconds(predicted.stall_seconds), ""),
    )
    return [Sheet(title="swaps of a step", headers=("", "predicted", "measured"), rows=rows)]


def _rich(sheet: Sheet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, header in enumerate(sheet.headers):
        table.add_column(header, justify="left" if index in sheet.left else "right", overflow="fold")
    for index, row in enumerate(sheet.rows):
        table.add_row(*_escaped(row), end_section=index in sheet.rules)
    return table


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("[", r"\[") for cell in cells]


def _on_tiers(found: Prediction | Row) -> list[tuple[str, int]]:
    """The tiers that hold bytes, with the number of bytes."""
    return [(tier, n) for tier, n in (("host", found.host_bytes), ("disk", found.disk_bytes)) if n]


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _of(part: int, whole: int) -> str:
    return f"{part / max(1, whole) * 100:.1f} %"


def _reduction(before: int | None, after: int | None) -> str:
    if not before or after is None:
        return ""
    return f"{format_bytes(before - after)} {(before - after) / before * 100:.1f} %"


def _extra(before: float | None, after: float | None) -> str:
    if not before or after is None:
        return ""
    return f"{format_seconds(after - before)} {format_percent(after / before - 1)}"


def _part(count: int, share: float, nbytes: int) -> str:
    return f"{count} ({share * 100:.1f} %) {format_bytes(nbytes)}"
