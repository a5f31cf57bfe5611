"""Pipelines side by side, compared as by torchgpipe's authors: stages, micro-batches, checkpointing, systems.

Every system trains the same model in this process on the same batch. In each cell, memfit's budget is the least memory
that any other system took, so a faster row of memfit is faster with no more memory. Peaks are measured in separate
runs, times in turns.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.residents import storage_bytes
from memfit.capture.training_step import device_of
from memfit.errors import BudgetError
from memfit.pipelining.api import pipeline
from memfit.pipelining.pipeline import Pipeline
from memfit.profiling.memory import measure
from memfit.tools import pipeline_baselines as baselines
from memfit.tools.pipeline_baselines import Passes, Trial

__all__ = ["SYSTEMS", "Cell", "PipelineComparison", "PipelineRow", "compare_cell"]

log = logging.getLogger(__name__)

SYSTEMS = ("memfit", "torchgpipe", "equal-layers")
_ADAM_BYTES = 12
"""Bytes per parameter in the seed's total: the parameter itself and two moments."""
_TRIES = 3
"""Largest number of new plans with a smaller budget if a plan takes more than predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Settings of one comparison: numbers of stages and micro-batches, and whether checkpoints are used."""

    num_stages: int
    num_microbatches: int
    checkpointed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """One system in one cell.

    Attributes:
        cell: settings of the run.
        system: name of the system.
        activation_bytes: measured peak beyond parameters and gradients.
        total_bytes: activation bytes plus twelve bytes per parameter, as the seed counts.
        stage_bytes: predicted peak of each stage alone, if known.
        forward_seconds: time of all forward passes of a step, median over steps.
        backward_seconds: time of all backward passes of a step, median over steps.
        samples_per_second: of the median step, including the conversion of gradients to those of the batch.
        memfit_speedup: step time of this system over that of memfit, median over turns; each turn runs every system, so
            that a change of the machine's speed affects all of them. 0 for memfit, and in cells without memfit.
        loss: loss of the last step.
        note: remarks.
    """

    cell: Cell
    system: str
    activation_bytes: int = 0
    total_bytes: int = 0
    stage_bytes: tuple[int, ...] = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    samples_per_second: float = 0.0
    memfit_speedup: float = 0.0
    loss: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineComparison:
    """The rows of all cells.

    Attributes:
        label: the model and its batch.
        rows: in the order in which they were measured.
    """

    label: str
    rows: tuple[PipelineRow, ...]

    def ratios(self) -> list[float]:
        """For each cell, the step time of the fastest other system over that of memfit."""
        of: dict[Cell, list[float]] = {}
        for row in self.rows:
            of.setdefault(row.cell, []).extend([row.memfit_speedup] if row.memfit_speedup else [])
        return [min(speedups) for speedups in of.values() if speedups]


def compare_cell(
    make: Callable[[], Any],
    cell: Cell,
    *,
    systems: Sequence[str] = SYSTEMS,
    repeats: int = 3,
    search_seconds: float = 0.5,
) -> list[PipelineRow]:
    """Runs the systems of one cell.

    Args:
        make: returns a model with its input, target and loss, the same at every call.
        cell: stages, micro-batches, checkpointing.
        systems: names from `SYSTEMS`.
        repeats: number of timed steps of each system, in turns.
        search_seconds: search time of memfit's plans.

    Returns:
        A row for each system that could run.
    """
    ready: dict[str, tuple[baselines.Step, nn.Module, int, tuple[int, ...], str]] = {}
    batch = 0
    for system in sorted(systems, key=lambda name: name == "memfit"):
        model, inputs, target, loss_fn = make()
        batch = len(inputs)
        trial = Trial(
            model=model,
            inputs=inputs,
            target=target,
            loss_fn=loss_fn,
            num_stages=cell.num_stages,
            num_microbatches=cell.num_microbatches,
            checkpointed=cell.checkpointed,
        )
        stage_bytes: tuple[int, ...] = ()
        note = ""
        if system == "memfit":
            others = [row[2] for row in ready.values()]
            piped, step = _memfit(trial, min(others, default=None), search_seconds)
            plan = piped.plan
            stage_bytes = tuple(stage.peak_bytes for stage in plan.stages)
            again = sum(stage.recompute_seconds for stage in plan.stages)
            note = f"{plan.schedule.name}, {again / max(1e-9, sum(s.forward_seconds for s in plan.stages)):.0%} again"
        else:
            build = baselines.torchgpipe if system == "torchgpipe" else baselines.equal_layers
            step = build(trial)
        peak = _activation_peak(step, model, inputs, target)
        ready[system] = step, model, peak, stage_bytes, note
        gc.collect()
    passes: dict[str, list[Passes]] = {system: [] for system in ready}
    seconds: dict[str, list[float]] = {system: [] for system in ready}
    orders = itertools.cycle(itertools.permutations(ready))  # the state of memory depends on the step before
    for order in itertools.islice(orders, repeats):
        for system in order:
            step, model, *_ = ready[system]
            model.zero_grad()
            begin = time.perf_counter()
            passes[system].append(copy.copy(step()))
            seconds[system].append(time.perf_counter() - begin)
    rows = []
    for system in [s for s in SYSTEMS if s in ready]:
        _, model, peak, stage_bytes, note = ready[system]
        forward = statistics.median(p.forward_seconds for p in passes[system])
        backward = statistics.median(p.backward_seconds for p in passes[system])
        rows.append(
            PipelineRow(
                cell=cell,
                system=system,
                activation_bytes=peak,
                total_bytes=peak + _ADAM_BYTES * sum(p.numel() for p in model.parameters()),
                stage_bytes=stage_bytes,
                forward_seconds=forward,
                backward_seconds=backward,
                samples_per_second=batch / statistics.median(seconds[system]),
                memfit_speedup=_speedup(seconds, system),
                loss=passes[system][-1].loss,
                note=note,
            )
        )
    return rows


def _speedup(seconds: Mapping[str, Sequence[float]], system: str) -> float:
    if system == "memfit" or "memfit" not in seconds:
        return 0.0
    return statistics.median(its / ours for its, ours in zip(seconds[system], seconds["memfit"], strict=True))


def _memfit(trial: Trial, most_bytes: int | None, search_seconds: float) -> tuple[Pipeline, baselines.Step]:
    """The first pipeline found within `most_bytes` of activations, and its step; if none, one of the least memory."""
    made, step, taken = _tried(trial, search_seconds)
    if most_bytes is None or taken <= most_bytes:
        return made, step
    for _ in range(_TRIES):
        target = made.plan.peak_bytes[0] - (taken - most_bytes)
        try:
            made, step, taken = _tried(trial, search_seconds, budget_per_device=target)
        except BudgetError as error:
            log.info("no pipeline of %d bytes: %s", target, error)
            return _tried(trial, search_seconds, budget_per_device=error.least_bytes)[:2]
        if taken <= most_bytes:
            break
    return made, step


def _tried(trial: Trial, search_seconds: float, **options: Any) -> tuple[Pipeline, baselines.Step, int]:
    """A pipeline, its step, and the step's peak of activations."""
    made = _pipeline(trial, search_seconds, **options)
    step = _step(made, trial)
    return made, step, _activation_peak(step, trial.model, trial.inputs, trial.target)


def _pipeline(trial: Trial, search_seconds: float, **options: Any) -> Pipeline:
    return pipeline(
        *(trial.model, (trial.inputs,)),
        target=trial.target,
        loss_fn=trial.loss_fn,
        num_stages=trial.num_stages,
        num_microbatches=trial.num_microbatches,
        batch_norm="per-microbatch",
        schedule="1f1b",
        one_device=True,
        search_seconds=search_seconds,
        prove=False,
        **options,
    )


def _step(made: Pipeline, trial: Trial) -> baselines.Step:
    passes = Passes()
    baselines.time_passes(made.engine_stages(), passes)

    def step() -> Passes:
        passes.forward_seconds = passes.backward_seconds = 0.0
        passes.loss = float(made.step(trial.inputs, target=trial.target))
        return passes

    return step


def _activation_peak(step: baselines.Step, model: nn.Module, *inputs: torch.Tensor) -> int:
    """Peak of a step beyond parameters, gradients and inputs."""
    parameters = list(model.parameters())
    with baselines.inline_workers():
        return _beyond(step, parameters, inputs, device_of(model))


def _beyond(
    step: baselines.Step, parameters: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device
) -> int:
    step()
    start = storage_bytes([*parameters, *(p.grad for p in parameters), *inputs], device.type)
    return measure(step, device=device, warmup=0, repeats=0, start_bytes=start).peak_bytes - start
