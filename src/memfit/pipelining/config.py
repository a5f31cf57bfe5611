"""Requirements for a pipeline, and the result of the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.capture.training_step import Capture
from memfit.ir.graph import StepGraph
from memfit.pipelining.partition.stages import Stage
from memfit.planner.pipeline.device_memory import StageMemory
from memfit.planner.pipeline.schedule import Schedule, StageTimes, Timeline
from memfit.planner.pipeline.stage_plan import PlannedStage

__all__ = ["LINK_BYTES_PER_SECOND", "POLICIES", "Found", "Question", "StagePlan"]

POLICIES = ("auto", "never", "always", "except_last")

LINK_BYTES_PER_SECOND = 4e9
"""Assumed speed of a transfer between devices, where it is not known: enough to prefer narrow cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Requirements for a pipeline.

    Attributes:
        num_devices: how many devices work together.
        one_device: whether they are all the same one, where stages take turns and the budget is for all of them.
        num_microbatches: into how many parts the batch is cut.
        budget_bytes: of each device; None for as much as it takes.
        schedule: a name of `SCHEDULES`, or `"auto"`.
        policy: `"auto"` for plans within the budget, or one of torchgpipe's: what is saved of each micro-batch.
        optimizer: of the model's parameters; its state counts.
        trained_bytes: of the model's parameters that receive gradients, for an optimizer that is a number.
        search_seconds: roughly how long each search for a stage's plan takes.
        tiers: where stages may swap to.
        levers: as for `memfit.fit`.
        allow_batch_norm: whether batch normalisation may take its statistics from each micro-batch.
        prove: run each device's part alone to measure its peak, and correct the plan.
        in_processes: whether each device has a process of its own; they prove a plan together.
    """

    num_devices: int
    num_microbatches: int
    one_device: bool = False
    budget_bytes: tuple[int, ...] | None = None
    schedule: str = "auto"
    policy: str = "auto"
    optimizer: OptimizerLike | None = None
    trained_bytes: int = 0
    search_seconds: float = 2.0
    tiers: str | None = None
    levers: str | tuple[str, ...] = "bitwise"
    allow_batch_norm: bool = False
    prove: bool = True
    in_processes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """How one stage runs.

    Attributes:
        stage: its module and what crosses its cuts.
        capture: of its step.
        graph: its profiled step of one micro-batch.
        planned: the program of each micro-batch, or of all but the last.
        last: the program of the last micro-batch where that is another one.
        in_flight: the most micro-batches that are in flight there.
    """

    stage: Stage
    capture: Capture
    graph: StepGraph
    planned: PlannedStage
    last: PlannedStage | None = None
    in_flight: int

    def memory(self, microbatch: int, num_microbatches: int) -> StageMemory:
        """Memory that the stage takes with a micro-batch."""
        last = self.last is not None and microbatch == num_microbatches - 1
        return (self.last if last and self.last is not None else self.planned).memory

    @property
    def times(self) -> StageTimes:
        """Times of one micro-batch at the stage."""
        crossing = sum(c.nbytes for c in self.stage.leaving)
        return StageTimes(
            forward_seconds=self.planned.forward_seconds,
            backward_seconds=self.planned.backward_seconds,
            weight_seconds=self.planned.weight_seconds,
            transfer_seconds=crossing / LINK_BYTES_PER_SECOND,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pipeline that fits.

    Attributes:
        schedule: who does what when.
        cuts: how many calls of the forward graph come before each cut.
        stages: the plan of each.
        timeline: of the step, one device a rank.
        peak_bytes: predicted, of each device.
        counted_twice: see `memfit.planner.pipeline.device_memory.device_peaks`.
    """

    schedule: Schedule
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    timeline: Timeline
    peak_bytes: tuple[int, ...]
    counted_twice: Callable[[frozenset[int]], int]
