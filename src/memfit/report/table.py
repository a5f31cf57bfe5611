"""Results as tables for people: in colour on a terminal, otherwise as plain text.

Predicted and measured values are side by side, and each is marked.
"""

from __future__ import annotations

import io
from functools import singledispatch

from rich.console import Console

from memfit.compiler.plan import CompiledPlan
from memfit.ir.plan_file import Prediction
from memfit.report.records import csv_text, json_text
from memfit.tables import Sheet, print_sheets, text_console
from memfit.tools.compare import BatchSize, Comparison
from memfit.tools.compare_pipelines import PipelineComparison
from memfit.tools.effective_batch import EffectiveBatch
from memfit.tools.estimate import Estimate
from memfit.tools.max_size import LargestSize
from memfit.tools.verify import Verification
from memfit.units import format_bytes, format_seconds

__all__ = ["Sheet", "csv_text", "json_text", "plain_text", "show"]

_MOST_MODULES = 10


def show(result: object, console: Console) -> None:
    """Writes a result to a console."""
    if isinstance(result, CompiledPlan):
        console.print(str(result), markup=False, highlight=False, soft_wrap=True)
        return
    print_sheets(sheets(result), console)


def plain_text(result: object) -> str:
    """A result as text without colour, as wide as necessary."""
    out = io.StringIO()
    show(result, text_console(out))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


@singledispatch
def sheets(result: object) -> list[Sheet]:
    """The tables of a result."""
    raise TypeError(f"there is no table for {type(result).__name__}")


@sheets.register
def _(result: Sheet) -> list[Sheet]:
    return [result]


@sheets.register(Comparison)
@sheets.register(BatchSize)
@sheets.register(EffectiveBatch)
@sheets.register(LargestSize)
def _(result: Comparison | BatchSize | EffectiveBatch | LargestSize) -> list[Sheet]:
    return result.sheets()


@sheets.register
def _(result: Estimate) -> list[Sheet]:
    rows = [(kind, format_bytes(nbytes), _of(nbytes, result.peak)) for kind, nbytes in result.by_kind()]
    rows.append((f"peak, at {result.peak_at}", format_bytes(result.peak), ""))
    if result.outputs_held_bytes:
        rows.append(("more if the loop holds the outputs", format_bytes(result.outputs_held_bytes), ""))
    parts = Sheet(
        title=f"estimate  {result.label} ({result.basis})",
        headers=("what", "predicted", "of the peak"),
        rows=tuple(rows),
        rules=frozenset({len(result.by_kind()) - 1}),
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
        title=f"verify  {result.plan.label} · {result.steps} steps, baseline against planned",
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
            ("baseline", format_bytes(predicted.plain_peak_bytes), format_bytes(result.plain_peak_bytes)),
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


def _on_tiers(found: Prediction) -> list[tuple[str, int]]:
    """The tiers that hold bytes, with the number of bytes."""
    return [(tier, n) for tier, n in (("host", found.host_bytes), ("disk", found.disk_bytes)) if n]


def _of(part: int, whole: int) -> str:
    return f"{part / max(1, whole) * 100:.1f} %"
