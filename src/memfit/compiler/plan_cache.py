"""Plans on disk, so that the next run of a script does not search and prove again.

A plan is kept under a digest of everything that it depends on: the captured step, the budget, what the request allows,
and the machine, as for measured costs. The files are plan files (`memfit.ir.plan_file`): data that is validated,
readable by their owner only. They are kept in `$MEMFIT_CACHE`, or the user's cache directory, up to 256 MiB; the files
that were used least recently go first.

Known limits: the step is captured in each run, since its graph holds code; a plan from disk has no proof of this run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.capture.state.input_signature import Signature
from memfit.capture.training_step import Capture
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.request import Planned, Request
from memfit.compiler.stages import fingerprint
from memfit.errors import MemfitError
from memfit.ir.graph import StepGraph
from memfit.ir.plan_file import SCHEMA_VERSION
from memfit.ir.serialization import graph_digest
from memfit.profiling.cost_cache import cache_directory, machine_name
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check

__all__ = [
    "drop_oldest",
    "is_known_to_have_one_size",
    "is_known_to_need_a_plan",
    "keep_plan",
    "keeps_plans",
    "kept_plan",
    "note_many_sizes",
    "note_need_of_a_plan",
]

log = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20
_NOTE_BYTES = 4096
"""Bytes that an empty file counts for."""

_KINDS = (".json", ".needed", ".sizes")
"""Plans, notes that a call needs a plan, and notes that a module has inputs of several sizes."""


def keeps_plans() -> bool:
    """Whether plans are kept at all; the variable `MEMFIT_KEEP_PLANS` set to `no` says that they are not."""
    return os.environ.get("MEMFIT_KEEP_PLANS") != "no"


def kept_plan(
    step: tuple[Capture, StepGraph], request: Request, budget_bytes: int, device: torch.device, signature: Signature
) -> CompiledPlan | None:
    """The plan of an earlier run for the same step; None if there is none.

    Args:
        step: the captured step and its graph with costs.
        request: what the plan must fulfil.
        budget_bytes: peak of the whole step.
        device: where it runs.
        signature: signature of the call.
    """
    capture, graph = step
    path = _path(graph, request, budget_bytes, device)
    try:
        plan = CompiledPlan.load(path)
        check(graph, plan.program)
        fits = simulate(graph, plan.program).peak_bytes <= budget_bytes
    except FileNotFoundError:
        return None
    except (OSError, MemfitError) as error:
        log.warning("ignoring the plan in %s: %s", path, error)
        return None
    if not fits or plan.graph_digest != graph_digest(graph):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # files that were used last stay
    log.info("the plan of an earlier run, %s, is used", path)
    planned = Planned(capture=capture, graph=graph, request=request, signature=signature)
    return replace(plan, budget_bytes=budget_bytes, planned=planned)


def keep_plan(plan: CompiledPlan, device: torch.device) -> None:
    """Writes a plan to disk; a disk that cannot be written is told, and no error."""
    assert plan.planned is not None
    path = _path(plan.planned.graph, plan.planned.request, plan.budget_bytes, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        plan.save(path)  # replaces a file at once, or not at all
        drop_oldest(path.parent, _MOST_BYTES)
    except (OSError, MemfitError) as error:
        log.warning("the plan is not kept for later runs: %s", error)


def is_known_to_need_a_plan(model: nn.Module, args: Any, kwargs: Any, request: Request, budget_bytes: int) -> bool:
    """Whether an earlier run made a plan for such a call, so that nobody needs to count its baseline step."""
    return keeps_plans() and _mark(model, args, kwargs, request, budget_bytes).exists()


def note_need_of_a_plan(model: nn.Module, args: Any, kwargs: Any, plan: CompiledPlan) -> None:
    """Notes that a call needs a plan."""
    assert plan.planned is not None
    with contextlib.suppress(OSError):
        _mark(model, args, kwargs, plan.planned.request, plan.budget_bytes).touch(mode=0o600)


def is_known_to_have_one_size(model: nn.Module, args: Any, kwargs: Any, request: Request, budget_bytes: int) -> bool:
    """Whether an earlier run made a plan for such a call, and no run made one from it for another size."""
    return is_known_to_need_a_plan(model, args, kwargs, request, budget_bytes) and not _mark_of_sizes(model).exists()


def note_many_sizes(model: nn.Module) -> None:
    """Notes that a module is called with inputs of several sizes."""
    if keeps_plans():
        with contextlib.suppress(OSError):
            path = _mark_of_sizes(model)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)


def _mark(model: nn.Module, args: Any, kwargs: Any, request: Request, budget_bytes: int) -> Path:
    optimizer = type(request.whole_optimizer).__qualname__
    return _mark_for([fingerprint(model, args, kwargs), budget_bytes, optimizer, request.beside_bytes], "needed")


def _mark_of_sizes(model: nn.Module) -> Path:
    return _mark_for([fingerprint(model, (), {})], "sizes")


def _mark_for(facts: list[Any], kind: str) -> Path:
    return cache_directory() / "plans" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.{kind}"


def _path(graph: StepGraph, request: Request, budget_bytes: int, device: torch.device) -> Path:
    allowed = (request.strategy, request.levers, request.tiers, request.exact, request.search_seconds)
    of_step = (graph_digest(graph), graph.static_bytes, graph.after_step_bytes, budget_bytes)
    facts = json.dumps([SCHEMA_VERSION, machine_name(device), allowed, of_step])
    return cache_directory() / "plans" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def drop_oldest(folder: Path, most_bytes: int) -> None:
    """Removes the plans and notes that were used least recently, until the others take a number of bytes at most."""
    found = sorted(
        ((path.stat(), path) for path in folder.iterdir() if path.suffix in _KINDS), key=lambda one: -one[0].st_mtime_ns
    )
    total = 0
    for state, path in found:
        total += state.st_size or _NOTE_BYTES
        if total > most_bytes:
            path.unlink(missing_ok=True)
