"""The one sentence that ends each answer."""

from __future__ import annotations

from functools import singledispatch

from memfit.compiler.plan import CompiledPlan
from memfit.tools.compare import BatchSize, Comparison, Row
from memfit.tools.compare_pipelines import PipelineComparison
from memfit.tools.effective_batch import EffectiveBatch
from memfit.tools.estimate import Estimate
from memfit.tools.max_size import LargestSize
from memfit.tools.verify import Verification
from memfit.units import format_bytes, format_percent, format_seconds

__all__ = ["sentence"]


@singledispatch
def sentence(result: object) -> str:
    """The result in one plain sentence; each number is marked as predicted or measured."""
    raise TypeError(f"nothing to say about {type(result).__name__}")


@sentence.register
def _(result: CompiledPlan) -> str:
    return result.summary()


@sentence.register
def _(result: Estimate) -> str:
    share = result.activations / result.peak if result.peak else 0.0
    return (
        f"Takes {format_bytes(result.peak)} predicted, {share:.0%} of it activations; "
        f"no plan of whole ops goes below {format_bytes(result.least)}."
    )


@sentence.register
def _(result: EffectiveBatch) -> str:
    return (
        f"Fits: micro-batches of {result.micro_batch}, {result.accumulation_steps} for {result.samples} samples; "
        f"{format_bytes(result.predicted_peak_bytes)} predicted, of {format_bytes(result.budget_bytes)}; "
        f"{format_seconds(result.predicted_seconds)} predicted for all of them."
    )


@sentence.register
def _(result: BatchSize) -> str:
    measured = "" if result.measured_peak_bytes is None else f", {format_bytes(result.measured_peak_bytes)} measured"
    against = (
        f"{result.ratio:.2f} times the plain {result.plain}"
        if result.plain
        else "the baseline step does not fit at all"
    )
    return (
        f"Fits: batch {result.planned} ({against}), {format_bytes(result.predicted_peak_bytes)} predicted{measured}, "
        f"of {format_bytes(result.budget_bytes)}; {format_percent(result.overhead)} step time predicted."
    )


@sentence.register
def _(result: PipelineComparison) -> str:
    ratios = result.ratios()
    if not ratios:
        return f"{len(result.rows)} rows measured."
    return (
        f"memfit over the best other system, measured, medians of steps in turns: {min(ratios):.2f} to "
        f"{max(ratios):.2f} in {len(ratios)} cells, {sum(ratio >= 1.0 for ratio in ratios)} of them at least 1."
    )


@sentence.register
def _(result: LargestSize) -> str:
    measured = "" if result.measured_peak_bytes is None else f", {format_bytes(result.measured_peak_bytes)} measured"
    against = (
        f"{result.ratio:.2f} times the plain {result.plain}"
        if result.plain
        else "the baseline step does not fit at all"
    )
    return (
        f"Fits: size {result.planned} ({against}), {format_bytes(result.predicted_peak_bytes)} predicted{measured}, "
        f"of {format_bytes(result.budget_bytes)}; {format_percent(result.overhead)} step time predicted."
    )


@sentence.register
def _(result: Comparison) -> str:
    fitting = [row for row in result.rows if row.fits]
    if not fitting:
        least = [row.least_bytes for row in result.rows if row.least_bytes]
        return "Does not fit: no strategy keeps its budget" + (
            f"; the least that works is {format_bytes(min(least))}." if least else "."
        )
    limited = [row for row in fitting if row.budget_bytes is not None] or fitting
    best = min(limited, key=lambda row: ((row.peak_bytes or 0) / max(1, row.plain_peak_bytes), row.overhead or 0.0))
    return f"Fits: {len(fitting)} of {len(result.rows)}; the largest reduction: {_words(best)}."


@sentence.register
def _(result: Verification) -> str:
    plan = result.plan
    if result.differing:
        worst = max(result.differing, key=lambda check: check.max_difference)
        bits = (
            f"Not exact: {len(result.differing)} of {len(result.checks)} tensors differ, the most {worst.kind} "
            f"{worst.name} by {worst.max_difference:.3g}"
        )
    elif result.rounded:
        bits = (
            f"Exact up to rounding: {len(result.checks)} tensors of {result.steps} steps, "
            f"{len(result.checks) - len(result.rounded)} equal bit by bit"
        )
    else:
        bits = f"Exact: {len(result.checks)} tensors of {result.steps} steps equal bit by bit"
    fits = "fits" if result.fits else "does not fit"
    return (
        f"{bits}; {fits}: {format_bytes(plan.predicted.peak_bytes)} predicted, {format_bytes(result.peak_bytes)} "
        f"measured, of {format_bytes(plan.budget_bytes)}; {format_percent(plan.predicted.overhead)} step time "
        f"predicted; recomputed {result.recomputes_executed} of {result.recomputes_planned} ops as planned"
        + (
            f"; swapped {format_bytes(sum(result.swapped_executed_bytes))} of "
            f"{format_bytes(sum(result.swapped_planned_bytes))}."
            if any(result.swapped_planned_bytes)
            else "."
        )
        + ("" if result.difference is None else f" T{str(result.difference)[1:]}.")
    )


def _words(row: Row) -> str:
    peak = f"from {format_bytes(row.plain_peak_bytes)} to {format_bytes(row.peak_bytes or 0)} predicted"
    if row.measured_peak_bytes is not None:
        peak += f", {format_bytes(row.measured_peak_bytes)} measured"
    overhead = f"{format_percent(row.overhead or 0.0)} step time predicted"
    if row.measured_overhead is not None:
        overhead += f", {format_percent(row.measured_overhead)} measured"
    return f"{row.strategy} at batch {row.batch}, {peak}, {overhead}"
