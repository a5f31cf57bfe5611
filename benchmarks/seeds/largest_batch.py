"""Seed 001's question: how much larger a batch trains on ResNet-50 in the same memory.

There: 87 plain, 111 by swapping, 212 by recomputation, 214 with its hybrid of both, which is 2.46 times as many.
"""

from __future__ import annotations

import torch

from benchmarks.report import Report, Table
from memfit.api import max_batch
from memfit.zoo import build

__all__ = ["COLUMNS", "run"]

COLUMNS = (
    "model",
    "who",
    "budget GB",
    "largest baseline batch",
    "largest planned batch",
    "times",
    "peak there, predicted GB",
    "peak there, measured GB",
    "overhead there, profiled %",
)


def run(
    report: Report,
    table: Table,
    device: torch.device,
    *,
    spec: str,
    shape: tuple[int, ...],
    budget_bytes: int,
    tiers: str,
) -> None:
    """Adds the seed's rows and memfit's.

    Args:
        report: prints.
        table: with `COLUMNS`.
        device: where to run.
        spec: the model.
        shape: of one sample.
        budget_bytes: peak of the step.
        tiers: where swapped bytes may go.
    """
    for strategy, largest in (("swap", 111), ("recompute", 212), ("hybrid", 214)):
        report.add(
            *(table, "resnet50", f"seed 001, {strategy}", "8.00", 87, largest, f"{largest / 87:.2f}", "", "", "")
        )
    for who, strategy, to in (
        ("memfit, swap", "swap", tiers),
        ("memfit, recompute", "auto", "none"),
        ("memfit, auto", "auto", tiers),
    ):
        _add(report, table, device, who, spec=spec, shape=shape, budget_bytes=budget_bytes, strategy=strategy, tiers=to)


def _add(
    report: Report,
    table: Table,
    device: torch.device,
    who: str,
    *,
    spec: str,
    shape: tuple[int, ...],
    budget_bytes: int,
    strategy: str,
    tiers: str,
) -> None:
    model = build(spec, batch=1, shape=shape, device=device).model
    found = max_batch(
        model,
        lambda batch: build(spec, batch=batch, shape=shape, device=device).args,
        make_loss=lambda batch: build(spec, batch=batch, shape=shape, device=device).loss_fn,
        budget=budget_bytes,
        strategy=strategy,
        tiers=tiers,
    )
    report.add(
        table,
        spec.partition(":")[2],
        who,
        _gb(budget_bytes),
        found.plain,
        found.planned,
        f"{found.planned / max(1, found.plain):.2f}",
        _gb(found.predicted_peak_bytes),
        "" if found.measured_peak_bytes is None else _gb(found.measured_peak_bytes),
        f"{100 * found.overhead:.1f}",
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"
