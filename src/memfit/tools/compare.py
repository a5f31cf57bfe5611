"""Strategies side by side: the same steps, the same simulator, the same runtime, the same measurements.

For every batch size, and size of image or sequence, the step is captured and profiled once. Every strategy plans it
under every budget, and all plans run in turns with the baseline step in one process, so that a drift of the machine's
speed affects all of them equally. A budget that no plan fits gives a row that says so, not an error.

Known limits: with an optimizer, the measured times include its step; the predicted times do not.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit import strategies as known_strategies
from memfit.capture.state.snapshot import preserved
from memfit.capture.training_step import Capture, device_of
from memfit.compiler.driver import plan_profiled
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.proving import prove
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import capture_and_profile, check_request, resolve_budget
from memfit.device_memory import free_bytes
from memfit.errors import BudgetError, MemfitError, SpecError
from memfit.ir.graph import StepGraph
from memfit.planner.analysis.activations import count_activations
from memfit.runtime.executable import compile_program
from memfit.sim.simulator import simulate, simulate_baseline
from memfit.tools.comparison import Comparison, Row
from memfit.tools.max_batch import BatchSize, max_batch
from memfit.tools.training_loop import interleaved_seconds, resident_bytes, step_peak, training_step
from memfit.torch_compat.core import user_modes_set_aside
from memfit.units import parse_bytes

__all__ = ["BatchSize", "Comparison", "Row", "budget_bytes", "compare", "max_batch"]

log = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_NO_BUDGET = 1 << 60
_IGNORE_BUDGET = frozenset(
    {
        "none",
        "sqrt",
        "every-block",
        "openai-speed",
        "openai-memory",
        "openai-collection",
        "sequential",
        "tile",
        "micro-batch",
    }
)
"""Strategies whose order does not depend on the budget; names without parameter."""


@user_modes_set_aside()
def compare(
    make_example: Callable[..., Any],
    *,
    strategies: Sequence[str],
    batches: Sequence[int],
    sizes: Sequence[int | None] = (None,),
    budgets: Sequence[int | str | None] = (None,),
    optimizer: OptimizerFactory | None = None,
    levers: str | tuple[str, ...] = "bitwise",
    tiers: str | None = None,
    measure: bool = True,
    repeats: int = 3,
    progress: Progress | None = None,
) -> Comparison:
    """Plans and runs a model with several strategies, batch sizes and budgets.

    Args:
        make_example: takes a batch size, and a size if there are `sizes`; returns `(model, args, kwargs)`, a
            `memfit.zoo.Example` or `(model, args)`.
        strategies: names, see `memfit.strategies.names()`. One that ignores budgets gives one row per batch size.
        batches: batch sizes.
        sizes: of images or sequences; None for the size of the example.
        budgets: bytes or strings. Here a percentage (`"40%"` or `"40%plain"`) refers to the baseline step's predicted
            peak, at which strategies are compared. None is no limit.
        optimizer: makes an optimizer from parameters, such as `torch.optim.AdamW`; its state and step count.
        levers: levers that `"auto"` may use, as for `memfit.plan`.
        tiers: tiers that may hold swapped bytes, as for `memfit.plan`.
        measure: run all steps; otherwise only the predictions are filled in.
        repeats: timed runs of each step.
        progress: called with the progress.

    Returns:
        One row for each batch size, size, strategy and budget.

    Raises:
        SpecError: if a name, a batch size or a budget is invalid.
        CaptureError: if the model cannot be captured.
    """
    _validate(strategies, batches, budgets)
    rows: list[Row] = []
    label = device = ""
    for batch, size in itertools.product(batches, sizes):
        model, args, kwargs, loss_fn, title = _parts(make_example(*((batch,) if size is None else (batch, size))))
        label, device = label or title, str(device_of(model))
        made = None if optimizer is None else optimizer(model.parameters())
        request = Request(
            budget="auto", loss_fn=loss_fn, optimizer=made, label=title, levers=levers, tiers=tiers, prove=False
        )
        check_request(request, device_of(model))
        capture, graph = capture_and_profile(model, args, kwargs, request, progress=progress)
        bench = _Bench(model=model, args=args, kwargs=kwargs, capture=capture, graph=graph, request=request)
        made_rows = _rows_of_step(bench, batch, strategies, budgets, repeats if measure else 0, progress)
        rows += [replace(row, size=size) for row in made_rows]
    if len(batches) * len(sizes) > 1:
        label = label.partition(" · ")[0]
    return Comparison(label=label, device=device, rows=tuple(rows))


def budget_bytes(
    budget: int | str | None, plain_peak_bytes: int, device: torch.device, static_bytes: int = 0
) -> int | None:
    """Bytes of a budget in a comparison.

    Args:
        budget: None, bytes, `"8GiB"`, `"auto"`, or `"40%"` of the baseline step's peak (also `"40%plain"`).
        plain_peak_bytes: predicted peak of the baseline step.
        device: device to whose memory `auto` refers.
        static_bytes: see `memfit.compiler.stages.resolve_budget`.

    Raises:
        SpecError: if the budget cannot be parsed.
    """
    if budget is None or budget == "auto":
        return None if budget is None else resolve_budget(budget, device, static_bytes)
    text = budget.strip().removesuffix("plain") if isinstance(budget, str) else budget
    return parse_bytes(text, whole_bytes=plain_peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A captured step, with the model, inputs and request to run it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    capture: Capture
    graph: StepGraph
    request: Request

    def step(self, plan: CompiledPlan | None) -> Callable[[], object]:
        """One training step, plain or planned."""
        call: Callable[..., Any] = self.model
        if plan is not None:
            assert plan.planned is not None
            call = compile_program(self.model, plan.planned.capture, plan.program, describe=plan.words())
        loss_fn, optimizer = self.request.loss_fn, self.request.whole_optimizer
        return training_step(call, self.model, self.args, self.kwargs, loss_fn=loss_fn, optimizer=optimizer)

    def peak(self, step: Callable[[], object]) -> int:
        """Measured peak of a step."""
        device = device_of(self.model)
        return step_peak(
            step,
            device,
            lambda: resident_bytes(self.model, self.args, self.kwargs, self.request.whole_optimizer, device),
        )


def _rows_of_step(
    bench: _Bench,
    batch: int,
    strategies: Sequence[str],
    budgets: Sequence[int | str | None],
    repeats: int,
    progress: Progress | None,
) -> list[Row]:
    graph, device = bench.graph, device_of(bench.model)
    baseline_peak = simulate_baseline(graph).peak_bytes
    amounts = [budget_bytes(b, baseline_peak, device, graph.static_bytes) for b in budgets]
    pairs = list(_pairs(strategies, amounts))
    planned: list[tuple[Row, CompiledPlan | None]] = []
    for number, (strategy, amount) in enumerate(pairs):
        if progress is not None:
            progress(f"plan batch {batch}", number, len(pairs))
        row = Row(
            batch=batch,
            strategy=strategy,
            budget_bytes=amount,
            plain_peak_bytes=baseline_peak,
            plain_seconds=graph.plain_seconds,
        )
        planned.append(_planned(bench, row))
    if progress is not None:
        progress(f"plan batch {batch}", len(pairs), len(pairs))
    if not repeats:
        return [row for row, _ in planned]
    with preserved(bench.model):
        return _measured(bench, planned, repeats, progress)


def _pairs(strategies: Sequence[str], amounts: Sequence[int | None]) -> Iterator[tuple[str, int | None]]:
    """Each strategy with the budgets on which its order depends."""
    for strategy in strategies:
        for amount in [None] if strategy.partition(":")[0] in _IGNORE_BUDGET else amounts:
            yield strategy, amount


def _planned(bench: _Bench, row: Row) -> tuple[Row, CompiledPlan | None]:
    """Completes a row with predictions."""
    request = replace(bench.request, strategy=row.strategy, budget=row.budget_bytes or _NO_BUDGET)
    try:
        plan = plan_profiled(
            *(bench.model, bench.args, bench.kwargs, (bench.capture, bench.graph), request),
            row.budget_bytes or _NO_BUDGET,
        )
    except BudgetError as error:
        return replace(row, error=str(error), least_bytes=error.least_bytes), None
    except MemfitError as error:
        return replace(row, error=str(error)), None
    return _with_plan(row, plan), plan


def _with_plan(row: Row, plan: CompiledPlan) -> Row:
    assert plan.planned is not None
    graph = plan.planned.graph
    timeline = simulate(graph, plan.program)
    return replace(
        row,
        peak_bytes=timeline.peak_bytes,
        seconds=timeline.step_seconds,
        recompute_seconds=timeline.recompute_seconds,
        out_bytes=timeline.out_bytes,
        in_bytes=timeline.in_bytes,
        overlap=timeline.overlap if timeline.out_bytes else None,
        stall_seconds=timeline.stall_seconds,
        host_bytes=plan.predicted.host_bytes,
        disk_bytes=plan.predicted.disk_bytes,
        bound_overhead=plan.predicted.bound_overhead,
        activations=count_activations(graph, plan.program),
    )


def _measured(
    bench: _Bench, planned: Sequence[tuple[Row, CompiledPlan | None]], repeats: int, progress: Progress | None
) -> list[Row]:
    """Completes rows with measurements, for all plans that the free memory of the machine allows."""
    device = device_of(bench.model)
    free = free_bytes(device) + bench.graph.static_bytes
    rows = [row for row, _ in planned]
    steps: list[Callable[[], object]] = []
    measured: list[int] = []
    baseline_peak: int | None = None
    if rows and rows[0].plain_peak_bytes <= free:
        steps.append(bench.step(None))
        baseline_peak = bench.peak(steps[0])
    for number, (row, plan) in enumerate(planned):
        if progress is not None:
            progress(f"measure batch {row.batch}: peaks", number, len(planned))
        if plan is None:
            continue
        if plan.predicted.peak_bytes > free:
            log.warning("not run, it needs more memory than is free: batch %d, %s", row.batch, row.strategy)
            continue
        try:
            rows[number], step = _proven(bench, row, plan)
        except BudgetError as error:
            rows[number] = replace(row, error=str(error), least_bytes=error.least_bytes)
            continue
        steps.append(step)
        measured.append(number)
    batch = rows[0].batch if rows else 0
    if progress is not None:
        progress(f"measure batch {batch}: peaks", len(planned), len(planned))

    def timing(done: int, total: int) -> None:
        if progress is not None:
            progress(f"measure batch {batch}: times", done, total)

    seconds = interleaved_seconds(steps, device, repeats=repeats, progress=timing)
    plain_seconds = None if baseline_peak is None else seconds.pop(0)
    rows = [replace(r, measured_plain_peak_bytes=baseline_peak, measured_plain_seconds=plain_seconds) for r in rows]
    for number, median in zip(measured, seconds, strict=True):
        rows[number] = replace(rows[number], measured_seconds=median)
    return rows


def _proven(bench: _Bench, row: Row, plan: CompiledPlan) -> tuple[Row, Callable[[], object]]:
    """Runs a plan; if the measured peak exceeds the budget, proves and corrects the plan, and runs it again."""
    step = bench.step(plan)
    peak = bench.peak(step)
    if row.budget_bytes is not None and peak > row.budget_bytes:
        plan = prove(bench.model, bench.args, bench.kwargs, plan)
        row, step = _with_plan(row, plan), bench.step(plan)
        peak = bench.peak(step)
    return replace(row, measured_peak_bytes=peak), step


def _parts(example: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any, str]:
    """Model, args, kwargs, loss function and label of the example that `make_example` returned."""
    if isinstance(example, tuple) and len(example) in (2, 3) and isinstance(example[0], nn.Module):
        model, args, *rest = example
        return model, tuple(args), dict(rest[0] if rest else {}), None, type(model).__name__
    if not isinstance(getattr(example, "model", None), nn.Module):
        raise SpecError(
            "make_example must return a memfit.zoo.Example, (model, args) or (model, args, kwargs) "
            f"(returned: {type(example).__name__})"
        )
    title = example.label or type(example.model).__name__
    return example.model, tuple(example.args), dict(example.kwargs), example.loss_fn, title


def _validate(strategies: Sequence[str], batches: Sequence[int], budgets: Sequence[int | str | None]) -> None:
    if not (strategies and batches and budgets):
        raise SpecError(
            "compare needs at least one strategy, one batch size and one budget "
            f"(strategies: {list(strategies)}, batches: {list(batches)}, budgets: {list(budgets)})"
        )
    for name in strategies:
        known_strategies.check_name(name)
    for batch in batches:
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise SpecError(f"a batch size is a whole number from 1 on (batch: {batch!r})")
    for budget in budgets:
        if budget not in (None, "auto"):
            budget_bytes(budget, 1 << 40, torch.device("cpu"), 0)
