"""One script plain and planned: whether it is planned, how much of it, and whether every bit is the same."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import memfit
from benchmarks.coverage.script import STEPS, NotBuilt, Results, Script
from benchmarks.fuzz.live_bytes import LiveBytes, storage_bytes
from benchmarks.fuzz.snapshot import same
from benchmarks.notices import OTHER_WAY, notices
from memfit.ir.graph import Phase, StorageKind
from memfit.ir.residents import ResidentKind, bytes_of

__all__ = ["STATUSES", "trial"]

EXACT, SUBGRAPHS, REFUSED, WRONG, CRASH = "planned exactly", "planned in subgraphs", "refused", "wrong", "crash"
NOT_BUILT = "not built"
STATUSES = (EXACT, SUBGRAPHS, REFUSED, WRONG, CRASH, NOT_BUILT, "slow", "not run")

SHARE = 0.8
"""Of the baseline step's predicted peak that is the budget, unless its parameters alone leave too little of it."""

PLANNED_AGAIN = "planned again in the last step, so its memory is not the step's alone"

TOOK_ANOTHER_WAY = "code took another way in some step, which memfit told"

ROOM = 0.85
"""Of the way from what a single op needs to the baseline peak: what such a budget is instead."""


class _NotPlanned(Exception):
    """Fitting raised: ends the script, which need not know of memfit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _Fitter:
    """`fit` for a script; keeps what it did."""

    search_seconds: float
    seconds: float = 0.0
    models: list[nn.Module] = field(default_factory=list)
    plans: list[memfit.Plan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        begin = time.perf_counter()
        try:
            state = {name: tensor.detach().clone() for name, tensor in _tensors_of(model)}
            budget = _budget(memfit.estimate(model, args, kwargs, loss_fn=loss_fn, optimizer=optimizer))
            try:
                self._fit(model, args, kwargs, loss_fn, optimizer, budget)
            except memfit.BudgetError as error:
                self.notes.append("at the least budget")
                self._fit(model, args, kwargs, loss_fn, optimizer, error.least_bytes)
        except Exception as error:
            raise _NotPlanned(error) from error
        self.seconds += time.perf_counter() - begin
        self.notes += [f"fit changed {n}" for n, t in _tensors_of(model) if n not in state or not same(state[n], t)][:3]
        self.models.append(model)
        self.plans.append(memfit.plan_of(model))
        return model

    def _fit(self, model: Any, args: Any, kwargs: Any, loss_fn: Any, optimizer: Any, budget: int) -> None:
        more = {"loss_fn": loss_fn, "optimizer": optimizer, "search_seconds": self.search_seconds, "plain": False}
        memfit.fit(model, args, kwargs, budget=budget, **more)


@dataclass(slots=True)
class _Plain:
    """`fit` for the plain run."""

    models: list[nn.Module] = field(default_factory=list)

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self.models.append(model)
        return model


def trial(script: Script, *, judge_peak: bool, search_seconds: float = 0.5) -> dict[str, Any]:
    """Runs a script plain, plain again, and planned.

    Args:
        script: what to run.
        judge_peak: whether a step that takes more than the budget is wrong; the fitted module must be all there is.
        search_seconds: for `memfit.fit`.

    Returns:
        A row: status, reason, share of the activations under plan, seconds of `fit`, and peaks in bytes.
    """
    torch._dynamo.reset()
    begin = time.perf_counter()
    try:
        first, plain_bytes = _run(script, _Plain())
    except Exception as error:
        return {"status": NOT_BUILT, "reason": _sentence(error)}
    plain_seconds = time.perf_counter() - begin
    fitter = _Fitter(search_seconds)
    row: dict[str, Any] = {"plain_bytes": plain_bytes, "plain_seconds": round(plain_seconds, 2)}
    try:
        with notices() as told:
            found, planned_bytes = _run(script, fitter)
    except _NotPlanned as error:
        return row | _failure(error.error)
    except Exception as error:
        return row | _failure(error)
    fitter.notes += [TOOK_ANOTHER_WAY] * any(OTHER_WAY in text for text in told)
    wrong = [note for note in fitter.notes if note.startswith("fit changed")]
    for number, (a, b) in enumerate(zip(first, found, strict=True)):
        wrong += [f"step {number}: {name}" for name in _different(a, b)]
    if wrong and any(_different(a, b) for a, b in zip(first, _run(script, _Plain())[0], strict=True)):
        return {"status": NOT_BUILT, "reason": "the plain loop gives other bits the second time"}
    budget = sum(plan.budget_bytes for plan in fitter.plans)
    if judge_peak and planned_bytes > budget and PLANNED_AGAIN not in fitter.notes:
        wrong.append(f"over the budget: {planned_bytes} of {budget} bytes")
    subgraphs = max((_subgraphs(plan) for plan in fitter.plans), default=0)
    row |= {
        "planned_bytes": planned_bytes,
        "budget_bytes": budget,
        "predicted_plain_bytes": sum(plan.predicted.plain_peak_bytes for plan in fitter.plans),
        "fit_seconds": round(fitter.seconds, 1),
        "share": round(_share(fitter.plans), 3),
        "subgraphs": subgraphs,
        "reason": "; ".join(dict.fromkeys([*wrong[:4], *fitter.notes])),
    }
    return row | {"status": WRONG if wrong else EXACT if subgraphs == 1 else SUBGRAPHS}


def _run(script: Script, fit: _Plain | _Fitter) -> tuple[list[Results], int]:
    """Results of all steps but the last, and the peak of that: what it makes, beside parameters and buffers."""
    steps = script(fit)
    found = [_copied(next(steps)) for _ in range(STEPS - 1)]
    existing = [tensor for model in fit.models for _, tensor in _tensors_of(model)]
    plans = [memfit.plan_of(model) for model in fit.models] if isinstance(fit, _Fitter) else []
    with LiveBytes(existing) as live:
        next(steps)
    if isinstance(fit, _Fitter) and any(memfit.plan_of(m) is not p for m, p in zip(fit.models, plans, strict=True)):
        fit.notes.append(PLANNED_AGAIN)
    del steps
    torch._dynamo.reset()
    return found, storage_bytes(existing) + live.peak_bytes


def _copied(step: Results) -> Results:
    return {name: tensor.detach().clone() for name, tensor in step.items()}


def _budget(estimate: memfit.Estimate) -> int:
    return int(max(SHARE * estimate.peak, estimate.least + ROOM * (estimate.peak - estimate.least)))


def _tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _different(expected: Results, found: Results) -> list[str]:
    names = dict.fromkeys((*expected, *found))
    return [n for n in names if n not in expected or n not in found or not same(expected[n], found[n])]


def _subgraphs(plan: memfit.Plan) -> int:
    return len(plan.planned.capture.subgraphs.subgraphs) if plan.planned is not None else 1


def _share(plans: Sequence[memfit.Plan]) -> float:
    """Bytes of forward results that the backward pass reads, against these and what code between subgraphs holds."""
    inside = outside = 0
    for plan in plans:
        if plan.planned is None:
            continue
        graph = plan.planned.graph
        read = {s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
        inside += sum(graph.storages[s].nbytes for s in read if graph.storages[s].kind is StorageKind.FORWARD)
        outside += bytes_of(plan.planned.graph.residents, ResidentKind.PLAIN_CODE)
    return inside / max(1, inside + outside)


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, memfit.CaptureError):
        return {"status": REFUSED, "reason": _sentence(error)}
    if isinstance(error, memfit.BudgetError):
        return {"status": WRONG, "reason": f"least_bytes is refused: {_sentence(error)}"}
    trace = "".join(traceback.format_exception(error))[-2500:]
    return {"status": CRASH, "reason": _sentence(error), "trace": trace}


def _sentence(error: BaseException) -> str:
    named = "" if isinstance(error, NotBuilt) else f"{type(error).__name__}: "
    return f"{named}{' '.join(str(error).split())[:400]}"
