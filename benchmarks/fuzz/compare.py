"""A random model plain against fitted: the same bits, the state left alone, the budget kept."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import memfit
from benchmarks.fuzz.device import library_bytes
from benchmarks.fuzz.hooks import Log, register
from benchmarks.fuzz.loop import measured_turn, seed_all, turn
from benchmarks.fuzz.model import Case, assemble
from benchmarks.fuzz.modes import Mode, autocast
from benchmarks.fuzz.recipe import Recipe
from benchmarks.fuzz.snapshot import differences, same, snapshot
from benchmarks.notices import OTHER_DATA, OTHER_WAY, notices

__all__ = ["BAD", "CRASH", "FAILURES", "OK", "Plain", "compare", "plain_run"]

OK, NO_FIT, REFUSED, BAD, CRASH = "ok", "no fit", "refused", "BAD", "CRASH"
FAILURES = (BAD, CRASH, "SLOW")
TURNS = 3
_OVER = "takes more than its budget"
"""How memfit begins to tell that several passes, or inputs of another size, do not fit."""

_MOST_PLANNED_AGAIN = 5
"""A model that takes another way each time is planned again so often at most."""

_OF_THE_LOOP_BYTES = 256
"""Numbers that the loop makes of its losses, beside the model's and the loss's memory that a budget covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The plain loop of a recipe.

    Attributes:
        turns: what each turn left.
        log: of hooks.
        peak_bytes: of a turn after these.
        status: empty, or why there is nothing to compare with.
        error: of a loop that does not run.
    """

    turns: Sequence[dict[str, Any]] = ()
    log: Log = field(default_factory=list)
    peak_bytes: int = 0
    status: str = ""
    error: str = ""


class _Interrupted(Exception):
    """Raised by the fuzz in the middle of planning."""


def plain_run(recipe: Recipe) -> Plain:
    """Runs the plain loop twice; a model that gives other bits the second time is nothing to compare with."""
    runs: list[Plain] = []
    try:
        for _ in range(2):
            torch._dynamo.reset()
            case, log = assemble(recipe), []
            if recipe.mode.hooks:
                register(case, log, fitted=False)
                register(case, log, fitted=True)
            turns = [turn(case, number) for number in range(TURNS)]
            seen = list(log)
            runs.append(Plain(turns=turns, log=seen, peak_bytes=measured_turn(case, TURNS)))
    except Exception as error:
        return Plain(status="plain fails", error=_sentence(error))
    first, second = runs
    if any(differences(a, b) for a, b in zip(first.turns, second.turns, strict=True)) or first.log != second.log:
        return Plain(status="not deterministic")
    losses = [value for t in first.turns for name, value in t.items() if name.startswith("loss ")]
    if not all(torch.isfinite(loss) for loss in losses if isinstance(loss, torch.Tensor)):
        return Plain(status="not finite")
    return first


def compare(recipe: Recipe, plain: Plain, share: float, *, search_seconds: float = 0.5) -> dict[str, Any]:
    """Fits a new copy of a recipe's model and compares its loop with the plain one.

    Args:
        recipe: what to build.
        plain: its plain loop.
        share: of the baseline peak that is the budget; 0.0 for the least budget, by `BudgetError.least_bytes`.
        search_seconds: for `memfit.fit`.

    Returns:
        A row of results: what was tried, `status`, and what was wrong, in words.
    """
    torch._dynamo.reset()
    begin = time.perf_counter()
    row = _described(recipe) | {"share": share, "plain_bytes": plain.peak_bytes}
    problems: list[str] = []
    try:
        row |= _compared(recipe, plain, share, problems, search_seconds)
    except memfit.BudgetError as error:
        row |= {"status": NO_FIT, "least_bytes": error.least_bytes}
    except memfit.CaptureError as error:
        row |= {"status": REFUSED, "error": _sentence(error)}
    except Exception as error:
        row |= {"status": CRASH, "error": _sentence(error), "trace": traceback.format_exc()[-2500:]}
    if problems:
        row["status"] = CRASH if row["status"] == CRASH else BAD
    row |= {"problems": problems, "seconds": round(time.perf_counter() - begin, 1)}
    return row


def _live_bytes(case: Case, told: list[str], most_bytes: int) -> int:
    """The peak of a turn in which nothing is planned: what planning itself takes on a host is not the step's.

    Once memfit has told that code takes ways that are not planned, or that its memory depends on data, a turn that
    takes more than `most_bytes` may be one of these, so later ones are measured.
    """
    for number in range(TURNS, TURNS + _MOST_PLANNED_AGAIN):
        plan = memfit.plan_of(case.model)
        live = measured_turn(case, number)
        if live > most_bytes and case.recipe.mode.device == "cpu":  # by a mode that keeps gradients from sums in place
            live = min(live, measured_turn(case, number, by_allocator=True))
        may_stray = live > most_bytes and any(words in text for text in told for words in (OTHER_WAY, OTHER_DATA))
        if memfit.plan_of(case.model) is plan and not may_stray:
            break
    return live


def _compared(recipe: Recipe, plain: Plain, share: float, problems: list[str], seconds: float) -> dict[str, Any]:
    kept = library_bytes(recipe.mode.device)
    budget = int(plain.peak_bytes * share) + kept
    row: dict[str, Any] = {}
    if share == 0.0:
        budget = _least(recipe, plain, problems, seconds)
    case, log = assemble(recipe), []
    if recipe.mode.hooks:
        register(case, log, fitted=False)
    if recipe.seed % 5 == 0 and share == max(recipe.mode.shares):
        _interrupt(case, log, problems, budget, seconds)
    if recipe.mode.lazy:
        return row | _compared_lazily(case, plain, budget, problems, seconds)
    with notices() as told_at_first:
        _fit(case, log, problems, budget, seconds)
    plan = memfit.plan_of(case.model)
    row |= {
        "budget_bytes": budget,
        "predicted_bytes": plan.predicted.peak_bytes,
        "measured_bytes": plan.measured_peak_bytes,
        "recomputed": len(plan.program.recomputed()),
        "moved_bytes": plan.predicted.out_bytes,
        "tiled": plan.is_tiled,
    }
    if recipe.mode.hooks:
        register(case, log, fitted=True)
    with notices() as told:
        told.extend(told_at_first)
        for number, expected in enumerate(plain.turns):
            found = turn(case, number)
            problems += [f"turn {number}: {line}" for line in _different(expected, found, recipe.mode)]
        if _in_order(log) != _in_order(plain.log):
            problems.append(f"hooks ran otherwise: {_told(plain.log, log)}")
        row["live_bytes"] = live = _live_bytes(case, told, budget + _OF_THE_LOOP_BYTES - kept) + kept
    if live > budget + _OF_THE_LOOP_BYTES and any(_OVER in text for text in told):
        return row | {"status": NO_FIT, "least_bytes": live}  # in the middle of training it is told, not raised
    if live > budget + _OF_THE_LOOP_BYTES:
        problems.append(f"over the budget by {100 * (live / budget - 1):.1f} % ({live} of {budget} bytes)")
    return row | {"status": OK}


def _compared_lazily(case: Case, plain: Plain, budget: int, problems: list[str], seconds: float) -> dict[str, Any]:
    """Turns of a model that is fitted without inputs: the loop's loss is unknown, so its memory is not compared."""
    optimizer = case.optimizer if case.recipe.counts_optimizer else None
    memfit.fit(case.model, budget=budget, optimizer=optimizer, search_seconds=seconds)
    for number, expected in enumerate(plain.turns):
        found = turn(case, number)
        problems += [f"turn {number}: {line}" for line in _different(expected, found, case.recipe.mode)]
    plan = memfit.plan_of(case.model)
    predicted = plan.predicted.peak_bytes
    return {"budget_bytes": budget, "predicted_bytes": predicted, "plain": plan.is_plain, "status": OK}


def _least(recipe: Recipe, plain: Plain, problems: list[str], seconds: float) -> int:
    """The least budget as a caller learns it, from an error; that it works is what is tried."""
    budget = 1
    for attempt in range(3):
        try:
            _fit(assemble(recipe), [], problems, budget, seconds)
        except memfit.BudgetError as error:
            if attempt:
                problems.append(f"least_bytes is refused: {budget} was promised, {error.least_bytes} is asked for now")
            if error.least_bytes <= budget:
                problems.append(f"contradiction: {budget} bytes do not do, and at least {error.least_bytes} are needed")
                return budget
            budget = error.least_bytes
        else:
            return budget
    return budget


def _fit(case: Case, log: Log, problems: list[str], budget: int, seconds: float, **more: Any) -> None:
    """Calls `memfit.fit` and notes what it changed, whatever comes of it."""
    recipe = case.recipe
    args, keywords = case.inputs(0)
    seed_all(7)
    roots = {"model": case.model, "loss": case.loss, "optimizer": vars(case.optimizer), "inputs": (args, keywords)}
    before, identities, hooks_run = snapshot(**roots), _identities(case), len(log)
    optimizer = case.optimizer if recipe.counts_optimizer else None
    try:
        with autocast(recipe.mode):
            memfit.fit(
                case.model,
                args,
                keywords,
                budget=max(budget, 1),
                loss_fn=case.loss,
                optimizer=optimizer,
                search_seconds=seconds,
                plain=False,
                **recipe.mode.options,
                **more,
            )
    finally:
        problems += [f"fit changed {name}" for name in differences(before, snapshot(**roots))]
        problems += [f"fit replaced {name}" for name, i in _identities(case).items() if identities.get(name) != i]
        if len(log) > hooks_run:
            problems.append(f"fit ran hooks {len(log) - hooks_run} times")
            del log[hooks_run:]


def _interrupt(case: Case, log: Log, problems: list[str], budget: int, seconds: float) -> None:
    """Stops planning in the middle, which must leave no more of a trace than planning to the end."""
    calls = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 + case.recipe.seed % 7:
            raise _Interrupted

    try:
        _fit(case, log, problems, budget, seconds, progress=progress)
    except (_Interrupted, memfit.MemfitError):
        pass
    memfit.release(case.model)


def _identities(case: Case) -> dict[str, int]:
    named = (*case.model.named_parameters(), *case.model.named_buffers())
    return {name: id(tensor) for name, tensor in named}


def _different(expected: dict[str, Any], found: dict[str, Any], mode: Mode) -> list[str]:
    """What differs between two turns, with how much."""
    scale = max((_most(v) for k, v in expected.items() if k.startswith("gradient") and v is not None), default=0.0)
    lines = []
    for name in dict.fromkeys((*expected, *found)):
        if name not in expected or name not in found:
            lines.append(f"{name} is there only in the {'fitted' if name in found else 'plain'} one")
            continue
        a, b = expected[name], found[name]
        if same(a, b):
            continue
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
            lines.append(f"{name} is {_told_value(b)} instead of {_told_value(a)}")
            continue
        apart = (a.double() - b.double()).abs().max().item() if not a.is_complex() else (a - b).abs().max().item()
        if mode.tolerance and a.dtype == b.dtype and apart <= mode.tolerance * max(100 * _most(a), scale, 1e-3):
            continue  # a gradient that is nothing but rounding is measured at the scale of the others
        lines.append(f"{name} differs by {apart:.1e} of {_most(a):.1e}")
    return lines


def _most(tensor: torch.Tensor) -> float:
    return tensor.abs().double().max().item() if tensor.numel() and tensor.dtype is not torch.bool else 0.0


def _told_value(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]


def _in_order(log: Log) -> list[Any]:
    """Forward hooks in their order; backward ones sorted, as autograd promises none between parameters."""
    backward = {"backward", "before backward", "gradient", "accumulated"}
    return [[entry for entry in log if entry[1] not in backward], sorted(e for e in log if e[1] in backward)]


def _told(plain: Log, fitted: Log) -> str:
    there, here = (Counter((name or "model", kind) for name, kind, _ in log) for log in (plain, fitted))
    counts = [f"{kind} of {name} {here[name, kind]} times instead of {n}" for (name, kind), n in there.items()
              if here[name, kind] != n]  # fmt: skip
    return "; ".join(counts) or "with other values, or in another order"


def _described(recipe: Recipe) -> dict[str, Any]:
    return {
        "seed": recipe.seed,
        "mode": recipe.mode.name,
        "blocks": assemble(recipe).described(),
        "stem": recipe.stem,
        "shape": recipe.shape,
        "form": recipe.form,
        "loss": recipe.loss,
        "optimizer": recipe.optimizer if recipe.counts_optimizer else f"{recipe.optimizer}, not told",
        "strides": recipe.strides,
    }


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
