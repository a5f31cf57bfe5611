"""The largest batch that trains within a budget: found by prediction, confirmed by one run.

The step is captured at two batch sizes; `memfit.planner.analysis.batch_scaling` interpolates it at other sizes, so the
search runs nothing and needs no memory. The size that the search finds is captured, and the search is repeated with
this third point, until the result no longer changes. Then the step is planned and run once at this size; if the
measured peak exceeds the budget, the search continues with smaller sizes. The search never relies on out-of-memory
errors.

Known limits: if the model runs other ops at other sizes, the search captures every size that it tries, with inputs up
to twice those of the largest batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit import strategies
from memfit.capture.loss.reading import LossFunction
from memfit.capture.training_step import device_of
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import resolve_budget
from memfit.errors import BudgetError, SpecError
from memfit.ir.graph import StepGraph
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.offload.model import placed_on_tiers, swappable, swapping_step
from memfit.planner.offload.search import find_program
from memfit.planner.search.min_memory import least_order
from memfit.sim.simulator import simulate
from memfit.tables import Sheet, as_text
from memfit.tools.batch_steps import BatchSteps, LowestOrder, baseline_peak, settled
from memfit.torch_compat.core import user_modes_set_aside
from memfit.units import format_bytes, format_percent

__all__ = ["BatchPoint", "BatchSize", "max_batch"]

log = logging.getLogger(__name__)

_ROUNDS = 4
_CURVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """One batch size on the way to the largest one; all values are predicted.

    Attributes:
        batch: number of samples.
        plain_peak_bytes: peak of the baseline step.
        least_peak_bytes: approximately the least peak that the strategy reaches.
        overhead: extra time of the plan within the budget, as a fraction; None if no plan was found.
    """

    batch: int
    plain_peak_bytes: int
    least_peak_bytes: int
    overhead: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Result of `max_batch`: the largest batches of the plain and the planned step.

    Attributes:
        label: the model.
        budget_bytes: requested peak of the whole step.
        strategy: name of the planner.
        plain: largest batch of the baseline step; 0 if the smallest batch does not fit.
        planned: largest batch of the planned step.
        predicted_peak_bytes: peak of the planned step at its largest batch.
        measured_peak_bytes: the same peak, measured; None if nothing was run.
        overhead: predicted extra time of the planned step at its largest batch, as a fraction.
        curve: batch sizes up to the largest one.
    """

    label: str
    budget_bytes: int
    strategy: str
    plain: int
    planned: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    overhead: float
    curve: tuple[BatchPoint, ...]

    @property
    def ratio(self) -> float:
        """Largest planned batch over largest baseline batch."""
        return self.planned / self.plain if self.plain else float("inf")

    def __str__(self) -> str:
        """The table as plain text."""
        return as_text(self.sheets())

    def sheets(self) -> list[Sheet]:
        """The table."""
        budget = format_bytes(self.budget_bytes)
        rows = []
        for point in self.curve:
            marks = [
                m for m, b in (("largest plain", self.plain), ("largest planned", self.planned)) if b == point.batch
            ]
            overhead = "does not fit" if point.overhead is None else format_percent(point.overhead)
            cells = (format_bytes(point.plain_peak_bytes), format_bytes(point.least_peak_bytes), overhead)
            rows.append((str(point.batch), *cells, ", ".join(marks)))
        return [
            Sheet(
                title=f"max-batch  {self.label} · budget {budget} · strategy {self.strategy}",
                headers=("batch", "baseline peak predicted", "least peak predicted", "overhead predicted", ""),
                rows=tuple(rows),
                left=frozenset({4}),
            )
        ]


@user_modes_set_aside()
def max_batch(
    model: nn.Module,
    make_args: Callable[[int], Any],
    *,
    budget: int | str,
    make_loss: Callable[[int], LossFunction | None] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str = "auto",
    tiers: str | None = None,
    start: int = 1,
    limit: int = 65536,
    prove: bool = True,
    progress: Progress | None = None,
) -> BatchSize:
    """Finds the largest batch size that trains within a budget.

    Args:
        model: in training mode.
        make_args: takes a batch size; returns a tuple of positional inputs, a dict of keyword inputs, or both as
            `(tuple, dict)`.
        budget: peak of the whole step, as for `memfit.plan`.
        make_loss: takes a batch size; returns a loss function.
        optimizer: its state and step count.
        strategy: `"auto"`, or a known strategy by name.
        tiers: tiers that may hold swapped bytes, as for `memfit.plan`.
        start: smallest batch size to consider.
        limit: largest batch size to consider.
        prove: confirm the result by one run of the planned step.
        progress: called with the progress.

    Returns:
        The largest plain and planned batch, and the curve of batch sizes up to them.

    Raises:
        BudgetError: if even the smallest batch does not fit, with the least budget that works.
        CaptureError: if the model cannot be captured.
        SpecError: if an argument is invalid.
    """
    if not 1 <= start <= limit:
        raise SpecError(f"batch sizes go from start to limit, both from 1 on (start: {start}, limit: {limit})")
    strategies.check_name(strategy)
    request = Request(budget=budget, optimizer=optimizer, strategy=strategy, tiers=tiers, prove=prove)
    steps = BatchSteps(model, make_args, make_loss, request, progress)
    steps.capture(max(2, start))
    steps.capture(2 * max(2, start))
    budget_bytes = resolve_budget(budget, device_of(model), steps.at(start).static_bytes)

    plain = settled(steps, lambda: _largest(lambda b: baseline_peak(steps.at(b)) <= budget_bytes, start, limit))
    planned, plan = _confirmed(steps, budget_bytes, max(start, plain), start, limit)
    points = sorted({planned, *([plain] if plain else []), *_powers(start, planned)})
    curve: list[BatchPoint] = []
    for number, batch in enumerate(points):
        _tell(progress, "curve", number, len(points))
        overhead = plan.predicted.overhead if batch == planned else _overhead(steps.at(batch), strategy, budget_bytes)
        lowest = _lowest(steps, batch if steps.vary else planned, budget_bytes)
        curve.append(
            BatchPoint(
                batch=batch,
                plain_peak_bytes=baseline_peak(steps.at(batch)),
                least_peak_bytes=lowest.peak_bytes(steps.at(batch)),
                overhead=overhead,
            )
        )
    _tell(progress, "curve", len(points), len(points))
    return BatchSize(
        label=type(model).__name__,
        budget_bytes=budget_bytes,
        strategy=strategy,
        plain=min(plain, planned),
        planned=planned,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=plan.measured_peak_bytes,
        overhead=plan.predicted.overhead,
        curve=tuple(curve),
    )


def _largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest size from `start` to `limit` that fits, by doubling and bisection; 0 if `start` does not fit."""
    if not fits(start):
        return 0
    low, step = start, 1
    while low + step <= limit and fits(low + step):
        low, step = low + step, step * 2
    high = min(low + step, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _confirmed(steps: BatchSteps, budget_bytes: int, known: int, start: int, limit: int) -> tuple[int, CompiledPlan]:
    """The largest batch size whose step can be planned and, if asked for, run within the budget."""
    target = budget_bytes
    while True:
        found = settled(steps, lambda: _largest_planned(steps, target, min(known, limit), start, limit))  # noqa: B023
        batch = max(found, start)
        try:
            return batch, steps.plan(batch, budget_bytes)
        except BudgetError as error:
            if batch == start:
                raise
            missing = max(1, error.least_bytes - budget_bytes)
            log.info("batch %d takes %s more than predicted", batch, format_bytes(missing))
            target, limit = target - missing, batch - 1


def _largest_planned(steps: BatchSteps, budget_bytes: int, known: int, start: int, limit: int) -> int:
    """The largest batch size at which the strategy is predicted to fit.

    If all sizes have the same graph, an order found at one size is valid at all sizes, so few orders are searched for.
    """
    strategy = steps.request.strategy

    def fits(batch: int) -> bool:
        try:
            lowest = _lowest(steps, batch, budget_bytes)
        except BudgetError:
            return False
        return lowest.fits(steps.at(batch), budget_bytes)

    if strategy != "auto" or steps.vary:
        return _largest(fits, start, limit)
    found, batch = 0, known
    for _ in range(_ROUNDS):
        lowest = _lowest(steps, batch, budget_bytes)
        larger = _largest(lambda b: lowest.fits(steps.at(b), budget_bytes), start, limit)  # noqa: B023
        if larger <= found:
            break
        found = batch = larger
    return found


def _lowest(steps: BatchSteps, batch: int, budget_bytes: int) -> LowestOrder:
    """An order with approximately the least peak of the strategy at a batch size.

    Raises:
        BudgetError: if the strategy respects budgets and no order fits.
    """
    graph, strategy = leanest(steps.at(batch)), steps.request.strategy
    if strategy == "none":
        return LowestOrder(order=None, placed={})
    if strategy != "auto":
        order, placed = strategies.order_and_swaps(strategy, graph, budget_bytes)
        return LowestOrder(order=order, placed=placed)
    if batch not in steps.lowest:
        lowest = LowestOrder(order=least_order(graph), placed={})
        if graph.tiers:
            placed = placed_on_tiers(graph, swappable(graph))
            swapping = LowestOrder(order=least_order(swapping_step(graph, placed)), placed=placed)
            lowest = min(lowest, swapping, key=lambda one: one.peak_bytes(graph))
        steps.lowest[batch] = lowest
    return steps.lowest[batch]


def _overhead(graph: StepGraph, strategy: str, budget_bytes: int) -> float | None:
    """Predicted extra time of a plan within the budget; None if there is no plan."""
    try:
        if strategy == "auto":
            return find_program(graph, budget_bytes, seconds=_CURVE_SECONDS).timeline.overhead
        timeline = simulate(graph, strategies.program(strategy, graph, budget_bytes))
    except BudgetError:
        return None
    return timeline.overhead if timeline.peak_bytes <= budget_bytes else None


def _powers(start: int, limit: int) -> list[int]:
    """`start` and its doublings, up to the limit."""
    sizes = [start]
    while sizes[-1] * 2 <= limit:
        sizes.append(sizes[-1] * 2)
    return sizes


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)
