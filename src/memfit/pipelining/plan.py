"""The plan of a pipeline, which is printed and sent to other processes.

The plan names cuts and programs only; each process cuts the model itself, and runs nothing if its model differs from
the planned model. As JSON, the plan is validated like every plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from memfit.ir.fields import MOST_ITEMS, Bytes, Count, Fraction, Index, Indices, ListOfBytes, Name, Seconds, Words
from memfit.ir.jsonfile import as_document, record_of
from memfit.ir.program import Program
from memfit.pipelining.search.device_budgets import budget_text
from memfit.planner.pipeline.schedule import Schedule, StageTimes
from memfit.units import format_bytes, format_seconds

__all__ = ["PipelinePlan", "StageProgram", "calls_digest", "decode_pipeline", "encode_pipeline"]


class StageProgram(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The program with which a stage runs a micro-batch.

    Attributes:
        digest: of the step for which it was planned (`memfit.ir.serialization.graph_digest`).
        program: of every micro-batch, or of all micro-batches but the last.
        last_program: of the last micro-batch if it differs.
        separated: see `memfit.capture.training_step.Capture`.
        grid: see there; empty if no op runs slice by slice with another order of sums.
        in_flight: the largest number of micro-batches in flight at the stage.
        saved_bytes: memory that the stage holds for each micro-batch between its passes.
        static_bytes: parameters, gradients, optimizer state, buffers and inputs.
        peak_bytes: predicted, with all micro-batches in flight.
        forward_seconds: predicted, of one micro-batch.
        backward_seconds: predicted, of one micro-batch, with recomputation.
        weight_seconds: the part of the backward pass that can wait, if the schedule allows this.
        recompute_seconds: the part of the backward pass that is recomputation.
        begins: the module with which the stage begins.
    """

    digest: Name
    program: Program
    last_program: Program | None = None
    separated: Annotated[tuple[Words, ...], MOST_ITEMS] = ()
    grid: Annotated[tuple[Count, ...], Meta(max_length=3)] = ()
    in_flight: Index
    saved_bytes: Bytes
    static_bytes: Bytes
    peak_bytes: Bytes
    forward_seconds: Seconds
    backward_seconds: Seconds
    weight_seconds: Seconds = 0.0
    recompute_seconds: Seconds = 0.0
    begins: Name = ""


class PipelinePlan(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a model trains on several devices.

    Attributes:
        sizes: the samples of each micro-batch.
        schedule: the order of passes on each device.
        cuts: for each cut, the number of calls of the model before it.
        calls: digest of the functions that the model calls, in order.
        stages: the program of each stage.
        last_stages: the program of each stage for the last micro-batch, if that has another size.
        takes_random: whether the model draws random numbers.
        budget_bytes: of each device; None for no limit.
        step_seconds: predicted time of a step, by the schedule.
        bubble: predicted share of the devices' time in which they wait.
        peak_bytes: predicted, of each device.
        measured_peak_bytes: of each device, measured; empty if no peak was measured.
    """

    sizes: Indices
    schedule: Schedule
    cuts: Indices
    calls: Name
    stages: Annotated[tuple[StageProgram, ...], MOST_ITEMS]
    last_stages: Annotated[tuple[StageProgram, ...], MOST_ITEMS] = ()
    takes_random: bool = False
    budget_bytes: ListOfBytes | None = None
    step_seconds: Seconds
    bubble: Fraction
    peak_bytes: ListOfBytes
    measured_peak_bytes: ListOfBytes = ()

    def times(self) -> list[StageTimes]:
        """Predicted times of a micro-batch at each stage."""
        return [
            StageTimes(
                forward_seconds=s.forward_seconds, backward_seconds=s.backward_seconds, weight_seconds=s.weight_seconds
            )
            for s in self.stages
        ]

    def __str__(self) -> str:
        """The plan as a table."""
        devices = self.schedule.device_of()
        budget = "no budget" if self.budget_bytes is None else f"budget {budget_text(self.budget_bytes)}"
        lines = [
            f"pipeline  {len(self.peak_bytes)} devices · {len(self.stages)} stages · {len(self.sizes)} micro-batches "
            f"of {self.sizes[0]} · {self.schedule.name} · {budget}",
            f"          predicted step {format_seconds(self.step_seconds)}, of which devices wait {self.bubble:.0%}",
        ]
        if self.sizes[-1] != self.sizes[0]:
            lines[0] += f", the last of {self.sizes[-1]}"
        rows = [("stage", "device", "from", "forward", "backward", "recompute", "in flight", "saved of each", "peak")]
        for index, stage in enumerate(self.stages):
            rows.append(
                (
                    str(index),
                    str(devices[index]),
                    stage.begins or "loss",
                    format_seconds(stage.forward_seconds),
                    format_seconds(stage.backward_seconds),
                    format_seconds(stage.recompute_seconds),
                    str(stage.in_flight),
                    format_bytes(stage.saved_bytes),
                    format_bytes(stage.peak_bytes),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.measured_peak_bytes:
            both = zip(self.peak_bytes, self.measured_peak_bytes, strict=True)
            peaks = (f"{d}: {format_bytes(p)} predicted, {format_bytes(m)} measured" for d, (p, m) in enumerate(both))
            lines.append("  peak of device " + "; ".join(peaks))
        return "\n".join(lines)


def calls_digest(targets: Sequence[Any]) -> str:
    """Digest of the functions that a model calls, in order."""
    names = [getattr(target, "__name__", str(target)) for target in targets]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def encode_pipeline(plan: PipelinePlan) -> Any:
    """A plan as JSON data."""
    return as_document(plan)


def decode_pipeline(document: object) -> PipelinePlan:
    """The plan in a document.

    Raises:
        PlanFileError: if the document is not a pipeline plan.
    """
    return record_of(document, PipelinePlan)
