"""The result of a comparison of strategies: its rows, and its table."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.planner.analysis.activations import Activations
from memfit.tables import Sheet, as_text, bytes_cell, extra_cell, part_cell, reduction_cell, seconds_cell
from memfit.units import format_bytes, format_percent, format_seconds

__all__ = ["Comparison", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy at one batch size under one budget, predicted and measured.

    Attributes:
        batch: samples in the batch.
        size: of an image or a sequence, if several are compared.
        strategy: name of the planner.
        budget_bytes: requested peak of the whole step; None if the strategy takes no budget.
        plain_peak_bytes: predicted peak of the baseline step.
        peak_bytes: predicted peak of the planned step; None if no plan fits, like the fields of the plan below.
        measured_plain_peak_bytes: measured peak of the baseline step; None if it was not run.
        measured_peak_bytes: measured peak of the planned step; None if it was not run.
        plain_seconds: profiled time of the baseline step, op by op.
        seconds: profiled time of the planned step.
        measured_plain_seconds: median wall-clock time of the baseline step.
        measured_seconds: median wall-clock time of the planned step, run in turns with the plain one.
        recompute_seconds: profiled time of recomputation.
        out_bytes: bytes swapped out, predicted.
        in_bytes: bytes swapped in, predicted.
        overlap: share of the links' time during which compute goes on, predicted.
        stall_seconds: time that compute waits for links, predicted.
        host_bytes: peak on the host.
        disk_bytes: peak on the disk.
        bound_overhead: lower bound of the overhead of any plan with these tiers, as a fraction.
        activations: numbers of activations that are retained, recomputed and swapped.
        least_bytes: the least budget that works, if no plan fits.
        error: the reason, if no plan fits.
    """

    batch: int
    size: int | None = None
    strategy: str
    budget_bytes: int | None
    plain_peak_bytes: int
    plain_seconds: float
    peak_bytes: int | None = None
    seconds: float | None = None
    measured_plain_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_plain_seconds: float | None = None
    measured_seconds: float | None = None
    recompute_seconds: float | None = None
    out_bytes: int = 0
    in_bytes: int = 0
    overlap: float | None = None
    stall_seconds: float = 0.0
    host_bytes: int = 0
    disk_bytes: int = 0
    bound_overhead: float | None = None
    activations: Activations | None = None
    least_bytes: int | None = None
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and none of its peaks exceeds the budget."""
        peaks = [p for p in (self.peak_bytes, self.measured_peak_bytes) if p is not None]
        return bool(peaks) and not self.error and (self.budget_bytes is None or max(peaks) <= self.budget_bytes)

    @property
    def overhead(self) -> float | None:
        """Predicted extra time, as a fraction of the baseline step."""
        return _over(self.plain_seconds, self.seconds)

    @property
    def measured_overhead(self) -> float | None:
        """Measured extra time, as a fraction of the baseline step."""
        return _over(self.measured_plain_seconds, self.measured_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of `compare`, printable as a table."""

    label: str
    device: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        """The table as plain text."""
        return as_text(self.sheets())

    def sheets(self) -> list[Sheet]:
        """The table."""
        lines: list[tuple[str, ...]] = []
        rules: set[int] = set()
        swaps = any(row.out_bytes for row in self.rows)
        for row in self.rows:
            lines += [(*line, *more) if swaps else line for line, more in zip(_lines(row), _swaps(row), strict=False)]
            rules.add(len(lines) - 1)
        headers = (
            *(
                "batch",
                "strategy",
                "budget",
                "",
                "peak\nbefore",
                "peak\nafter",
                "reduction",
                "step\nbefore",
                "step\nafter",
            ),
            *("overhead", "bound", "recompute\ntime", "retained\nactivations", "recomputed\nactivations"),
            *(("swapped\nactivations", "out + in\nbytes", "on\ntiers", "beside\ncompute", "stalls") if swaps else ()),
        )
        title = f"compare  {self.label} · {self.device}"
        return [Sheet(title=title, headers=headers, rows=tuple(lines), left=frozenset({1, 3}), rules=frozenset(rules))]


def _over(plain: float | None, planned: float | None) -> float | None:
    return None if not plain or planned is None else planned / plain - 1


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
            *(
                *head,
                "predicted",
                before,
                bytes_cell(row.peak_bytes),
                reduction_cell(row.plain_peak_bytes, row.peak_bytes),
            ),
            *(plain_seconds, seconds_cell(row.seconds), extra_cell(row.plain_seconds, row.seconds)),
            "" if row.bound_overhead is None else format_percent(row.bound_overhead),
            seconds_cell(row.recompute_seconds),
            part_cell(a.retained, a.retained_share, a.retained_bytes) if a else "",
            part_cell(a.recomputed, a.recomputed_share, a.recomputed_bytes) if a else "",
        )
    ]
    if row.measured_peak_bytes is not None:
        lines.append(
            (
                *(
                    "",
                    "",
                    "",
                    "measured",
                    bytes_cell(row.measured_plain_peak_bytes),
                    bytes_cell(row.measured_peak_bytes),
                ),
                reduction_cell(row.measured_plain_peak_bytes, row.measured_peak_bytes),
                *(seconds_cell(row.measured_plain_seconds), seconds_cell(row.measured_seconds)),
                *(extra_cell(row.measured_plain_seconds, row.measured_seconds), *("",) * 4),
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
    swapped = part_cell(a.swapped, a.swapped_share, a.swapped_bytes)
    return [(swapped, moved, held, overlap, seconds_cell(row.stall_seconds)), none]


def _on_tiers(row: Row) -> list[tuple[str, int]]:
    """The tiers that hold bytes, with the number of bytes."""
    return [(tier, n) for tier, n in (("host", row.host_bytes), ("disk", row.disk_bytes)) if n]
