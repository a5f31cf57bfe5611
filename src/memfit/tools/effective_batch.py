"""The micro-batch and the number of accumulation steps that make an effective batch in the least time.

An optimizer step on 256 samples is 256 samples at once, or 4 times 64 with gradients added up. Small micro-batches need
no recomputation, and large ones use the device better. So each divisor of the effective batch is planned within the
budget, by prediction, and the one with the least predicted time is taken. The step is captured at
two sizes and at those that seem fastest, and interpolated at the others. Steps after the first of an effective batch
find gradients in memory, which count.

Known limits: a model with batch normalisation computes other statistics on micro-batches. The time of the optimizer is
the same for all and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import LossFunction
from memfit.capture.training_step import device_of
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import check_request, resolve_budget
from memfit.errors import BudgetError, SpecError
from memfit.ir.residents import ResidentKind
from memfit.planner.offload.search import find_program
from memfit.tables import Sheet, as_text
from memfit.tools.batch_steps import BatchSteps, baseline_peak
from memfit.torch_compat.core import user_modes_set_aside
from memfit.units import format_bytes, format_percent, format_seconds

__all__ = ["EffectiveBatch", "MicroBatch", "divided", "effective_batch"]

_SEARCH_SECONDS = 1.0
_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One way to make the effective batch; all values are predicted.

    Attributes:
        batch: samples of a forward and backward pass.
        accumulation_steps: passes for one step of the optimizer.
        plain_peak_bytes: peak of the baseline step.
        peak_bytes: peak of the planned step; None if no plan fits.
        seconds: time of all passes; None if no plan fits.
        overhead: extra time of the plan over the baseline step, as a fraction; None if no plan fits.
    """

    batch: int
    accumulation_steps: int
    plain_peak_bytes: int
    peak_bytes: int | None = None
    seconds: float | None = None
    overhead: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveBatch:
    """Result of `effective_batch`.

    Attributes:
        label: the model.
        budget_bytes: requested peak of the whole step.
        samples: the effective batch.
        micro_batch: samples of a forward and backward pass.
        accumulation_steps: passes for one step of the optimizer.
        predicted_peak_bytes: peak of the step.
        predicted_seconds: time of all passes.
        ways: the divisors that were tried.
    """

    label: str
    budget_bytes: int
    samples: int
    micro_batch: int
    accumulation_steps: int
    predicted_peak_bytes: int
    predicted_seconds: float
    ways: tuple[MicroBatch, ...]

    def __str__(self) -> str:
        """The table as plain text."""
        return as_text(self.sheets())

    def sheets(self) -> list[Sheet]:
        """The table."""
        rows = []
        for way in self.ways:
            cells = ["does not fit"] * 3
            if way.peak_bytes is not None and way.seconds is not None and way.overhead is not None:
                cells = [format_bytes(way.peak_bytes), format_percent(way.overhead), format_seconds(way.seconds)]
            mark = "the fastest" if way.batch == self.micro_batch else ""
            count = str(way.accumulation_steps)
            rows.append((str(way.batch), count, format_bytes(way.plain_peak_bytes), *cells, mark))
        title = f"max-batch  {self.label} · budget {format_bytes(self.budget_bytes)} · {self.samples} samples a step"
        return [
            Sheet(
                title=title,
                headers=(
                    *("micro-batch", "accumulation steps", "baseline peak predicted", "peak predicted"),
                    *("overhead predicted", "time of all predicted", ""),
                ),
                rows=tuple(rows),
                left=frozenset({6}),
            )
        ]


@user_modes_set_aside()
def effective_batch(
    model: nn.Module,
    make_args: Callable[[int], Any],
    *,
    samples: int,
    budget: int | str,
    make_loss: Callable[[int], LossFunction | None] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    tiers: str | None = None,
    progress: Progress | None = None,
) -> EffectiveBatch:
    """Finds the micro-batch with which an effective batch takes the least time within a budget. Runs no step.

    Args:
        model: in training mode.
        make_args: as for `memfit.max_batch`.
        samples: the effective batch: samples for one step of the optimizer.
        budget: peak of the whole step, as for `memfit.plan`.
        make_loss: takes a batch size; returns a loss function.
        optimizer: its state and step count.
        tiers: tiers that may hold swapped bytes, as for `memfit.plan`.
        progress: called with the progress.

    Returns:
        The micro-batch, a divisor of the effective batch, and the number of accumulation steps.

    Raises:
        BudgetError: if not even single samples fit, with the least budget that works.
        CaptureError: if the model cannot be captured.
        SpecError: if an argument is invalid.
    """
    if samples < 1:
        raise SpecError(f"an effective batch has at least one sample (samples: {samples})")
    request = Request(budget=budget, optimizer=optimizer, tiers=tiers, prove=False)
    check_request(request, device_of(model))
    return divided(BatchSteps(model, make_args, make_loss, request, progress), samples)


def divided(steps: BatchSteps, samples: int) -> EffectiveBatch:
    """Divides a batch whose steps are known; see `effective_batch`."""
    model = steps.model
    divisors = [d for d in range(1, samples + 1) if samples % d == 0]
    steps.capture(2)
    steps.capture(4)
    budget_bytes = resolve_budget(steps.request.budget, device_of(model), steps.at(2).static_bytes)
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    ways = _ways(steps, divisors, budget_bytes, gradient_bytes)
    for _ in range(_ROUNDS):
        best = min(ways, key=_time)
        if best.batch in steps.captured:
            break
        steps.capture(best.batch)  # what was interpolated so far is now known
        ways = _ways(steps, divisors, budget_bytes, gradient_bytes)
    best = min(ways, key=_time)
    assert best.peak_bytes is not None and best.seconds is not None
    return EffectiveBatch(
        label=type(model).__name__,
        budget_bytes=budget_bytes,
        samples=samples,
        micro_batch=best.batch,
        accumulation_steps=best.accumulation_steps,
        predicted_peak_bytes=best.peak_bytes,
        predicted_seconds=best.seconds,
        ways=tuple(ways),
    )


def _time(way: MicroBatch) -> tuple[float, int]:
    """What the ways are compared by: their time, then few passes."""
    return (math.inf if way.seconds is None else way.seconds), way.accumulation_steps


def _ways(steps: BatchSteps, divisors: Sequence[int], budget_bytes: int, gradient_bytes: int) -> list[MicroBatch]:
    """The ways to make an effective batch, planned.

    Raises:
        BudgetError: if none fits.
    """
    samples = divisors[-1]
    ways: list[MicroBatch] = []
    failure: BudgetError | None = None
    for number, batch in enumerate(divisors):
        if failure is not None and batch < samples:
            continue  # it takes more than one that does not fit
        if steps.progress is not None:
            steps.progress(f"micro-batch {batch}", number, len(divisors))
        graph, accumulation_steps = steps.at(batch), samples // batch
        if batch < samples:
            graph = graph.beside("gradients of earlier micro-batches", gradient_bytes, ResidentKind.GRADIENT)
        way = MicroBatch(batch=batch, accumulation_steps=accumulation_steps, plain_peak_bytes=baseline_peak(graph))
        try:
            timeline = find_program(graph, budget_bytes, seconds=_SEARCH_SECONDS).timeline
        except BudgetError as error:
            failure = failure or error
        else:
            seconds = timeline.step_seconds * accumulation_steps
            way = replace(way, peak_bytes=timeline.peak_bytes, seconds=seconds, overhead=timeline.overhead)
        ways.append(way)
    if failure is not None and all(way.seconds is None for way in ways):
        raise failure
    return ways
