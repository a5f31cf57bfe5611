"""Seed 003's table again: ResNet-50 at batch 4 to 64 within 1.49 GB, its planner's columns beside memfit's.

The seed's planner (mu-TWO style) evicts the activation with the best recompute ratio until the peak fits. Bytes are
in units of 10^9; parameters, gradients and SGD without momentum, which holds no state, are within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.report import Report, Table
from benchmarks.subject import Case, Subject
from memfit.errors import BudgetError
from memfit.planner.analysis.activations import count_activations
from memfit.sim.simulator import simulate

__all__ = ["BUDGET_BYTES", "COLUMNS", "run"]

BUDGET_BYTES = 1_490_000_000

COLUMNS = (
    "batch",
    "who",
    "peak before GB",
    "peak after GB",
    "peak after, measured GB",
    "reduction %",
    "step before s",
    "step after s",
    "overhead %",
    "overhead, wall clock %",
    "recomputation s",
    "retained activations",
    "recomputed activations",
    "retained GB",
    "saved GB",
)

_SEED = {
    4: ("1.47", "1.47", "", "0.0", "1.32", "1.32", "0.0", "", "0", "620 (100.0 %)", "0 (0.0 %)", "0.67", "0"),
    8: ("2.13", "1.5", "", "29.6", "1.39", "2.07", "48.9", "", "0.68", "559 (90.2 %)", "61 (9.8 %)", "0.68", "0.65"),
    16: ("3.44", "1.5", "", "56.4", "1.63", "3.7", "127.0", "", "2.07", "501 (80.8 %)", "119 (19.2 %)", "0.67", "1.98"),
    32: (
        "6.08",
        "1.49",
        "",
        "75.5",
        "1.04",
        "5.92",
        "469.2",
        "",
        "4.88",
        "420 (67.7 %)",
        "200 (32.3 %)",
        "0.62",
        "4.66",
    ),
    64: (
        "11.35",
        "1.49",
        "",
        "86.9",
        "1.43",
        "11.91",
        "732.9",
        "",
        "10.47",
        "363 (58.5 %)",
        "257 (41.5 %)",
        "0.56",
        "9.99",
    ),
}
"""The seed's record: its own GPU and its own profiled times."""


def run(
    report: Report,
    table: Table,
    device: torch.device,
    *,
    spec: str,
    shape: tuple[int, ...],
    batches: Sequence[int],
    real: Sequence[int],
    budget_bytes: int,
    cached: bool,
) -> None:
    """Adds memfit's row below the seed's at each batch size.

    Args:
        report: prints.
        table: with `COLUMNS`.
        device: where to run.
        spec: the model.
        shape: of one sample.
        batches: batch sizes.
        real: those of them at which plain and planned steps are run.
        budget_bytes: peak of the step.
        cached: use the op costs known for this machine.
    """
    for batch in batches:
        if batch in _SEED:
            report.add(table, batch, "seed 003", *_SEED[batch])
        subject = Subject.of(Case(spec=spec, batch=batch, shape=shape), device, cached=cached)
        try:
            plan = subject.plan(budget_bytes)
            measured = wall = ""
            if batch in real:
                plan, result = subject.proven(plan)
                measured = _gb(result.peak_bytes)
                plain, planned = subject.seconds([None, plan])
                wall = f"{100 * (planned / plain - 1):.1f}"
        except BudgetError as error:
            report.add(
                table, batch, "memfit", _gb(subject.plain.peak_bytes), f"least {_gb(error.least_bytes)}", *[""] * 11
            )
            continue
        timeline, before = simulate(subject.graph, plan.program), subject.plain
        kept = count_activations(subject.graph, plan.program)
        report.add(
            table,
            batch,
            "memfit",
            _gb(before.peak_bytes),
            _gb(timeline.peak_bytes),
            measured,
            f"{100 * (1 - timeline.peak_bytes / before.peak_bytes):.1f}",
            f"{before.step_seconds:.2f}",
            f"{timeline.step_seconds:.2f}",
            f"{100 * timeline.overhead:.1f}",
            wall,
            f"{timeline.recompute_seconds:.2f}",
            f"{kept.retained} ({100 * kept.retained_share:.1f} %)",
            f"{kept.recomputed} ({100 * kept.recomputed_share:.1f} %)",
            _gb(kept.retained_bytes),
            _gb(kept.recomputed_bytes),
        )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"
