"""Results as plain data for other programs: flat records for CSV, one document for JSON.

Names contain units, so numbers are raw: bytes, seconds, percent. A missing value (nothing was measured, no plan fits)
is an empty cell in CSV and null in JSON.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from functools import singledispatch
from typing import Any

from msgspec import structs

from memfit.compiler.difference import Difference
from memfit.compiler.plan import CompiledPlan
from memfit.tools.compare import BatchSize, Comparison, Row
from memfit.tools.compare_pipelines import PipelineComparison
from memfit.tools.effective_batch import EffectiveBatch
from memfit.tools.estimate import Estimate
from memfit.tools.max_size import LargestSize
from memfit.tools.verify import Verification

__all__ = ["COMPARISON_COLUMNS", "csv_text", "document", "json_text", "records", "summary"]

Record = dict[str, Any]


def csv_text(result: object) -> str:
    """The records of a result with one line of column names."""
    rows = records(result)
    out = io.StringIO()
    columns = list(rows[0]) if rows else list(COMPARISON_COLUMNS) if isinstance(result, Comparison) else []
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_text(result: object) -> str:
    """The document of a result as JSON; numbers that JSON cannot represent are null."""
    return json.dumps(_finite(document(result)), indent=2, ensure_ascii=False)


def document(result: object) -> Record:
    """The whole content of a result as JSON data."""
    return {**summary(result), "rows": records(result)}


@singledispatch
def records(result: object) -> list[Record]:
    """The rows of a result, all with the same columns."""
    raise TypeError(f"{type(result).__name__} has no rows")


@singledispatch
def summary(result: object) -> Record:
    """Fields of a result outside its rows."""
    raise TypeError(f"{type(result).__name__} cannot be summed up")


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else round(100 * fraction, 4)


def _less(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else before - after


def _share(before: float | None, after: float | None) -> float | None:
    return None if not before or after is None else round(100 * (before - after) / before, 4)


def _row(row: Row) -> Record:
    a = row.activations
    return {
        "batch": row.batch,
        "size": row.size,
        "strategy": row.strategy,
        "budget_bytes": row.budget_bytes,
        "fits": row.fits,
        "peak_before_predicted_bytes": row.plain_peak_bytes,
        "peak_after_predicted_bytes": row.peak_bytes,
        "peak_before_measured_bytes": row.measured_plain_peak_bytes,
        "peak_after_measured_bytes": row.measured_peak_bytes,
        "reduction_predicted_bytes": _less(row.plain_peak_bytes, row.peak_bytes),
        "reduction_predicted_percent": _share(row.plain_peak_bytes, row.peak_bytes),
        "reduction_measured_bytes": _less(row.measured_plain_peak_bytes, row.measured_peak_bytes),
        "reduction_measured_percent": _share(row.measured_plain_peak_bytes, row.measured_peak_bytes),
        "time_before_predicted_seconds": row.plain_seconds,
        "time_after_predicted_seconds": row.seconds,
        "time_before_measured_seconds": row.measured_plain_seconds,
        "time_after_measured_seconds": row.measured_seconds,
        "overhead_predicted_seconds": _less(row.seconds, row.plain_seconds),
        "overhead_predicted_percent": _percent(row.overhead),
        "overhead_measured_seconds": _less(row.measured_seconds, row.measured_plain_seconds),
        "overhead_measured_percent": _percent(row.measured_overhead),
        "overhead_bound_percent": _percent(row.bound_overhead),
        "recompute_predicted_seconds": row.recompute_seconds,
        "swap_out_predicted_bytes": row.out_bytes,
        "swap_in_predicted_bytes": row.in_bytes,
        "swap_overlap_predicted_percent": _percent(row.overlap),
        "swap_stall_predicted_seconds": row.stall_seconds,
        "host_bytes": row.host_bytes,
        "disk_bytes": row.disk_bytes,
        "retained_activations": a and a.retained,
        "retained_activations_percent": a and _percent(a.retained_share),
        "recomputed_activations": a and a.recomputed,
        "recomputed_activations_percent": a and _percent(a.recomputed_share),
        "swapped_activations": a and a.swapped,
        "swapped_activations_percent": a and _percent(a.swapped_share),
        "retained_bytes": a and a.retained_bytes,
        "saved_bytes": a and a.recomputed_bytes,
        "least_bytes": row.least_bytes,
        "error": row.error,
    }


COMPARISON_COLUMNS = tuple(_row(Row(batch=1, strategy="", budget_bytes=None, plain_peak_bytes=0, plain_seconds=0.0)))
"""Columns of a comparison, in order."""


@records.register
def _(result: Comparison) -> list[Record]:
    return [_row(row) for row in result.rows]


@summary.register
def _(result: Comparison) -> Record:
    return {"kind": "comparison", "label": result.label, "device": result.device}


@records.register
def _(result: CompiledPlan) -> list[Record]:
    return [structs.asdict(decision) for decision in result.decisions]


@summary.register
def _(result: CompiledPlan) -> Record:
    return {
        "kind": "plan",
        "label": result.label,
        "strategy": result.strategy,
        "budget_bytes": result.budget_bytes,
        "fits": result.fits,
        "predicted": structs.asdict(result.predicted),
        "measured_peak_bytes": result.measured_peak_bytes,
        "recomputed_ops": len(result.program.recomputed()),
        "is_tiled": result.is_tiled,
    }


@records.register
def _(result: Estimate) -> list[Record]:
    return [{"kind": kind, "predicted_bytes": nbytes} for kind, nbytes in result.by_kind()]


@summary.register
def _(result: Estimate) -> Record:
    return {
        "kind": "estimate",
        "label": result.label,
        "predicted_peak_bytes": result.peak,
        "predicted_outputs_held_bytes": result.outputs_held_bytes,
        "predicted_least_bytes": result.least,
        "roofline_seconds": result.step_seconds,
        "peak_at": result.peak_at,
        "peak_is_measured": result.measured,
        "swapping": None if result.swapping is None else structs.asdict(result.swapping),
        "activations_by_module": [{"module": name, "predicted_bytes": nbytes} for name, nbytes in result.by_module],
    }


@records.register
def _(result: BatchSize) -> list[Record]:
    return [
        {
            "batch": point.batch,
            "plain_peak_predicted_bytes": point.plain_peak_bytes,
            "least_peak_predicted_bytes": point.least_peak_bytes,
            "overhead_predicted_percent": _percent(point.overhead),
        }
        for point in result.curve
    ]


@records.register
def _(result: EffectiveBatch) -> list[Record]:
    return [
        {
            "micro_batch": way.batch,
            "accumulation_steps": way.accumulation_steps,
            "plain_peak_predicted_bytes": way.plain_peak_bytes,
            "peak_predicted_bytes": way.peak_bytes,
            "overhead_predicted_percent": _percent(way.overhead),
            "seconds_predicted": way.seconds,
        }
        for way in result.ways
    ]


@summary.register
def _(result: EffectiveBatch) -> Record:
    return {
        "kind": "effective batch",
        "label": result.label,
        "budget_bytes": result.budget_bytes,
        "samples": result.samples,
        "micro_batch": result.micro_batch,
        "accumulation_steps": result.accumulation_steps,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "seconds_predicted": result.predicted_seconds,
    }


@summary.register
def _(result: BatchSize) -> Record:
    return {
        "kind": "batch size",
        "label": result.label,
        "strategy": result.strategy,
        "budget_bytes": result.budget_bytes,
        "plain": result.plain,
        "planned": result.planned,
        "ratio": result.ratio,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "measured_peak_bytes": result.measured_peak_bytes,
        "overhead_predicted_percent": _percent(result.overhead),
    }


@records.register
def _(result: LargestSize) -> list[Record]:
    return [
        {
            "size": point.size,
            "plain_peak_predicted_bytes": point.plain_peak_bytes,
            "least_peak_predicted_bytes": point.least_peak_bytes,
        }
        for point in result.curve
    ]


@summary.register
def _(result: LargestSize) -> Record:
    return {
        "kind": "largest size",
        "label": result.label,
        "budget_bytes": result.budget_bytes,
        "plain": result.plain,
        "planned": result.planned,
        "ratio": result.ratio,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "measured_peak_bytes": result.measured_peak_bytes,
        "overhead_predicted_percent": _percent(result.overhead),
    }


@records.register
def _(result: PipelineComparison) -> list[Record]:
    return [
        {
            "num_stages": row.cell.num_stages,
            "num_microbatches": row.cell.num_microbatches,
            "checkpointed": row.cell.checkpointed,
            "system": row.system,
            "peak_activation_bytes": row.activation_bytes,
            "total_bytes": row.total_bytes,
            "forward_seconds": row.forward_seconds,
            "backward_seconds": row.backward_seconds,
            "samples_per_second": row.samples_per_second,
            "memfit_speedup": row.memfit_speedup,
            "peak_bytes_per_stage": " ".join(map(str, row.stage_bytes)),
            "loss": row.loss,
            "note": row.note,
        }
        for row in result.rows
    ]


@summary.register
def _(result: PipelineComparison) -> Record:
    return {"kind": "pipelines", "label": result.label, "ratios": result.ratios()}


@records.register
def _(result: Verification) -> list[Record]:
    return [asdict(check) for check in result.checks]


@summary.register
def _(result: Verification) -> Record:
    return {
        "kind": "verification",
        "passed": result.passed,
        "fits": result.fits,
        "steps": result.steps,
        "is_tiled": result.plan.is_tiled,
        "differing": len(result.differing),
        "difference": None if result.difference is None else _difference(result.difference),
        "rounded": len(result.rounded),
        "budget_bytes": result.plan.budget_bytes,
        "plain_peak_predicted_bytes": result.plan.predicted.plain_peak_bytes,
        "plain_peak_measured_bytes": result.plain_peak_bytes,
        "peak_predicted_bytes": result.plan.predicted.peak_bytes,
        "peak_measured_bytes": result.peak_bytes,
        "overhead_predicted_percent": _percent(result.plan.predicted.overhead),
        "recomputes_planned": result.recomputes_planned,
        "recomputes_executed": result.recomputes_executed,
        "swap_out_planned_bytes": result.swapped_planned_bytes[0],
        "swap_out_executed_bytes": result.swapped_executed_bytes[0],
        "swap_in_planned_bytes": result.swapped_planned_bytes[1],
        "swap_in_executed_bytes": result.swapped_executed_bytes[1],
        "swap_overlap_predicted_percent": _percent(result.plan.predicted.overlap),
        "swap_stall_predicted_seconds": result.plan.predicted.stall_seconds,
        "host_bytes": result.plan.predicted.host_bytes,
        "disk_bytes": result.plan.predicted.disk_bytes,
    }


def _difference(difference: Difference) -> Record:
    return {"sentence": str(difference), "is_layout": difference.is_layout, **asdict(difference)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
