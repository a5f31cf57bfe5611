"""The largest image or sequence that trains within a budget: found from a few sizes, confirmed by one run.

The growth of memory with size depends on the model (it is quadratic in the side of an image, and may be for attention),
so it is not assumed: the least peak is planned at two sizes, memory above parameters and gradients is fitted by a power
of the size, and the size at which this power meets the budget is planned next, until a size that fits and one that does
not are only one step apart. Then the step is planned and run once at the largest size that fits. The search never
relies on out-of-memory errors.

Known limits: each size that is tried is captured and its ops are timed, which takes the time of a few steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import LossFunction
from memfit.capture.training_step import device_of
from memfit.compiler.driver import make_plan
from memfit.compiler.grid_choice import grids
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import capture_and_profile, check_request, resolve_budget
from memfit.errors import BudgetError, SpecError
from memfit.ir.graph import StepGraph
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.search.min_memory import least_budget, least_order
from memfit.sim.simulator import simulate_baseline
from memfit.tables import Sheet, as_text
from memfit.torch_compat.core import user_modes_set_aside
from memfit.units import format_bytes

__all__ = ["LargestSize", "SizePoint", "max_size"]

log = logging.getLogger(__name__)

_FIRST_GROWTH = 2
_MOST_GROWTH = 4
"""Largest ratio of the next size to the current one, because the power is fitted only to smaller sizes."""

_PLANS = 3
"""Largest number of sizes to plan, each smaller than the last, if a plan does not reach the least peak."""

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any], LossFunction | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """One size on the way to the largest one; all values are predicted.

    Attributes:
        size: pixels of a side, or number of tokens.
        plain_peak_bytes: peak of the baseline step.
        least_peak_bytes: the least budget that works.
        fixed_bytes: parameters, inputs and gradients.
    """

    size: int
    plain_peak_bytes: int
    least_peak_bytes: int
    fixed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSize:
    """Result of `max_size`: the largest sizes of the plain and the planned step.

    Attributes:
        label: the model.
        budget_bytes: requested peak of the whole step.
        plain: largest size of the baseline step; 0 if the smallest size does not fit.
        planned: largest size of the planned step.
        predicted_peak_bytes: peak of the planned step at its largest size.
        measured_peak_bytes: the same peak, measured; None if nothing was run.
        overhead: predicted extra time of the planned step at its largest size, as a fraction.
        curve: the sizes that were tried.
    """

    label: str
    budget_bytes: int
    plain: int
    planned: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    overhead: float
    curve: tuple[SizePoint, ...]

    @property
    def ratio(self) -> float:
        """Largest planned size over largest baseline size."""
        return self.planned / self.plain if self.plain else math.inf

    def __str__(self) -> str:
        """The table as plain text."""
        return as_text(self.sheets())

    def sheets(self) -> list[Sheet]:
        """The table."""
        marks = {self.plain: "largest plain"}
        marks[self.planned] = ", ".join(m for m in (marks.get(self.planned), "largest planned") if m)
        rows = tuple(
            (str(p.size), format_bytes(p.plain_peak_bytes), format_bytes(p.least_peak_bytes), marks.get(p.size, ""))
            for p in self.curve
        )
        return [
            Sheet(
                title=f"max-size  {self.label} · budget {format_bytes(self.budget_bytes)}",
                headers=("size", "baseline peak predicted", "least budget predicted", ""),
                rows=rows,
                left=frozenset({3}),
            )
        ]


@user_modes_set_aside()
def max_size(
    make: Callable[[int], Made],
    *,
    budget: int | str,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    levers: str | tuple[str, ...] = "bitwise",
    start: int,
    step: int = 1,
    limit: int = 1 << 20,
    prove: bool = True,
    label: str = "",
    progress: Progress | None = None,
) -> LargestSize:
    """Finds the largest size of a sample that trains within a budget.

    Args:
        make: takes a size; returns `(model, args, kwargs, loss_fn)`. The model may depend on the size.
        budget: peak of the whole step, as for `memfit.plan`.
        optimizer: makes an optimizer from parameters; its state and step count.
        levers: as for `memfit.plan`; with `"all"` samples run in tiles.
        start: smallest size to consider.
        step: sizes are `start` plus a multiple of it.
        limit: largest size to consider.
        prove: confirm the result by one run of the planned step.
        label: name of the model, for people.
        progress: called with the progress.

    Raises:
        BudgetError: if even the smallest size does not fit, with the least budget that works.
        CaptureError: if the model cannot be captured.
        SpecError: if an argument is invalid.
    """
    if not (1 <= start <= limit and step >= 1):
        raise SpecError(
            f"sizes go from start to limit in steps from 1 on (start: {start}, limit: {limit}, step: {step})"
        )
    points: dict[int, SizePoint] = {}

    def request_for(model: nn.Module, loss_fn: LossFunction | None, budget: int | str) -> Request:
        made = None if optimizer is None else optimizer(model.parameters())
        return Request(budget=budget, loss_fn=loss_fn, optimizer=made, levers=levers, prove=prove, label=label)

    def at(size: int) -> SizePoint:
        if size not in points:
            _tell(progress, f"size {size}", 0)
            model, args, kwargs, loss_fn = make(size)
            request = request_for(model, loss_fn, budget)
            check_request(request, device_of(model))
            points[size] = _point(size, model, args, kwargs, request)
            _tell(progress, f"size {size}", 1)
        return points[size]

    first, *_ = make(start)
    budget_bytes = resolve_budget(budget, device_of(first))
    plain = _largest(lambda n: (at(n).plain_peak_bytes, at(n).fixed_bytes), budget_bytes, start, step, limit)
    planned = _largest(lambda n: (at(n).least_peak_bytes, at(n).fixed_bytes), budget_bytes, start, step, limit)
    if planned is None:
        least = at(start).least_peak_bytes
        raise BudgetError(
            f"not even size {start} fits {format_bytes(budget_bytes)}; the least budget that works there is "
            f"{format_bytes(least)} ({least} bytes)",
            budget_bytes=budget_bytes,
            least_bytes=least,
        )
    planned, plan = _confirmed(make, request_for, budget_bytes, planned, start, step, progress)
    return LargestSize(
        label=label or type(first).__name__,
        budget_bytes=budget_bytes,
        plain=min(plain or 0, planned),
        planned=planned,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=plan.measured_peak_bytes,
        overhead=plan.predicted.overhead,
        curve=tuple(points[size] for size in sorted(points)),
    )


def _point(size: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request) -> SizePoint:
    capture, graph = capture_and_profile(model, args, kwargs, request)
    fixed = graph.static_bytes + graph.gradient_bytes
    least = _least(graph)
    if request.tiles:
        room = resolve_budget(request.budget, device_of(model), graph.static_bytes) - fixed
        _, tiled = capture_and_profile(model, args, kwargs, request, grid=grids(capture, room)[0], before=capture)
        least = min(least, _least(tiled))
    return SizePoint(
        size=size,
        plain_peak_bytes=simulate_baseline(graph).peak_bytes,
        least_peak_bytes=least,
        fixed_bytes=fixed,
    )


def _least(graph: StepGraph) -> int:
    lean = leanest(graph)
    return least_budget(lean, least_order(lean))


def _largest(
    bytes_at: Callable[[int], tuple[int, int]], budget_bytes: int, start: int, step: int, limit: int
) -> int | None:
    """The largest size whose peak is within the budget; None if there is no such size.

    Args:
        bytes_at: takes a size; returns its peak, and the part of the peak that hardly grows with the size.
        budget_bytes: for the peak.
        start: the smallest size.
        step: difference between neighbouring sizes.
        limit: the largest size.
    """
    most = start + (limit - start) // step * step
    if bytes_at(start)[0] > budget_bytes:
        return None
    low, high = start, most + step
    other = start * _FIRST_GROWTH
    while high - low > step:
        size = other if low < other < high else _guess(bytes_at, budget_bytes, low, other)
        size = start + (min(size, _MOST_GROWTH * low) - start) // step * step
        size = max(low + step, min(size, high - step))
        if bytes_at(size)[0] <= budget_bytes:
            low, other = size, low
        else:
            high = other = size
    return low


def _guess(bytes_at: Callable[[int], tuple[int, int]], budget_bytes: int, one: int, other: int) -> int:
    """The size at which the peak meets the budget, if the growing part is a power of the size."""
    (peak, fixed), (peak_of_other, fixed_of_other) = bytes_at(one), bytes_at(other)
    grows, grows_of_other = max(1, peak - fixed), max(1, peak_of_other - fixed_of_other)
    power = min(4.0, max(0.5, math.log(grows_of_other / grows) / math.log(other / one)))
    return int(one * (max(1, budget_bytes - fixed) / grows) ** (1 / power))


def _confirmed(
    make: Callable[[int], Made],
    request_for: Callable[[nn.Module, LossFunction | None, int | str], Request],
    budget_bytes: int,
    size: int,
    start: int,
    step: int,
    progress: Progress | None,
) -> tuple[int, CompiledPlan]:
    """The plan at a size, or at a slightly smaller size if that plan does not fit."""
    for attempt in range(_PLANS):
        model, args, kwargs, loss_fn = make(size)
        try:
            return size, make_plan(model, args, kwargs, request_for(model, loss_fn, budget_bytes), progress=progress)
        except BudgetError as error:
            log.info("no plan at size %d: %s", size, error)
            if attempt == _PLANS - 1 or size - step < start:
                raise
            size = max(start, size - step * (1 << attempt))
    raise AssertionError("no plan was tried")


def _tell(progress: Progress | None, stage: str, done: int) -> None:
    if progress is not None:
        progress(stage, done, 1)
