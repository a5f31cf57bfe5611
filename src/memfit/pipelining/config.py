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
"""Assumed speed of transfers between devices, which is not measured; enough to prefer narrow cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Requirements for a pipeline.

    Attributes:
        num_devices: number of devices.
        one_device: whether all stages run on one device, take turns there and share one budget.
        num_microbatches: number of parts into which the batch is cut.
        budget_bytes: of each device; None for no limit.
        schedule: a name of `SCHEDULES`, or `"auto"`.
        policy: `"auto"` for plans within the budget, or a checkpoint policy of torchgpipe.
        optimizer: of the model's parameters; its state counts.
        trained_bytes: size of the model's parameters that receive gradients, for an optimizer that is given as a
            number.
        search_seconds: work of each search for a stage's plan, in seconds of one free core.
        tiers: tiers to which stages may swap.
        levers: as for `memfit.fit`.
        allow_batch_norm: whether batch normalisation may take its statistics from each micro-batch.
        prove: run each device's part alone to measure its peak, and correct the plan.
        in_processes: whether each device has a process of its own; the processes then prove a plan together.
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
    """The plan of one stage.

    Attributes:
        stage: its module and the tensors that cross its cuts.
        capture: of its step.
        graph: its profiled step of one micro-batch.
        planned: the program of each micro-batch, or of all micro-batches but the last.
        last: the program of the last micro-batch if it differs.
        in_flight: the largest number of micro-batches in flight at the stage.
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
        schedule: the order of passes on each device.
        cuts: for each cut, the number of calls of the forward graph before it.
        stages: the plan of each stage.
        timeline: of the step, one rank per device.
        peak_bytes: predicted, of each device.
        counted_twice: see `memfit.planner.pipeline.device_memory.device_peaks`.
    """

    schedule: Schedule
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    timeline: Timeline
    peak_bytes: tuple[int, ...]
    counted_twice: Callable[[frozenset[int]], int]
