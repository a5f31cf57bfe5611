"""The plan of a pipeline, which is printed and sent to other processes.

The plan names cuts and programs only; each process cuts the model itself, and runs nothing if its model differs from
the planned model. As JSON, the plan is validated against a schema, like every plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from memfit.errors import PlanFileError
from memfit.ir.program import Program
from memfit.ir.schema import PROGRAM_SCHEMA
from memfit.ir.serialization import decode_program, encode_program, validate
from memfit.pipelining.search.device_budgets import budget_text
from memfit.planner.pipeline.schedule import Action, Pass, Schedule, StageTimes
from memfit.units import format_bytes, format_seconds

__all__ = ["PipelinePlan", "StageProgram", "calls_digest", "decode_pipeline", "encode_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
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

    digest: str
    program: Program
    last_program: Program | None = None
    separated: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    in_flight: int
    saved_bytes: int
    static_bytes: int
    peak_bytes: int
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    recompute_seconds: float = 0.0
    begins: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
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

    sizes: tuple[int, ...]
    schedule: Schedule
    cuts: tuple[int, ...]
    calls: str
    stages: tuple[StageProgram, ...]
    last_stages: tuple[StageProgram, ...] = ()
    takes_random: bool = False
    budget_bytes: tuple[int, ...] | None = None
    step_seconds: float
    bubble: float
    peak_bytes: tuple[int, ...]
    measured_peak_bytes: tuple[int, ...] = ()

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


_TEXT = {"type": "string", "maxLength": 1000}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**60}
_SECONDS = {"type": "number", "minimum": 0, "maximum": 1e9}
_PROGRAM = {key: rule for key, rule in PROGRAM_SCHEMA.items() if key != "$schema"}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 1_000_000}


_STAGE_FIELDS: dict[str, Any] = {
    "digest": _TEXT,
    "program": _PROGRAM,
    "separated": _list(_TEXT),
    "grid": {"type": "array", "items": _COUNT, "maxItems": 3},
    **dict.fromkeys(("in_flight", "saved_bytes", "static_bytes", "peak_bytes"), _COUNT),
    **dict.fromkeys(("forward_seconds", "backward_seconds", "weight_seconds", "recompute_seconds"), _SECONDS),
    "begins": _TEXT,
}
_STAGE = {
    "type": "object",
    "properties": {**_STAGE_FIELDS, "last_program": _PROGRAM},
    "required": list(_STAGE_FIELDS),
    "additionalProperties": False,
}
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("sizes", "cuts", "peak_bytes", "measured_peak_bytes"), _list(_COUNT)),
    "schedule": {
        "type": "object",
        "properties": {
            "name": _TEXT,
            "num_stages": _COUNT,
            "num_microbatches": _COUNT,
            "orders": _list(_list({"type": "array", "prefixItems": [_COUNT, _TEXT, _COUNT], "minItems": 3})),
        },
        "required": ["name", "num_stages", "num_microbatches", "orders"],
        "additionalProperties": False,
    },
    "calls": _TEXT,
    "stages": _list(_STAGE),
    "last_stages": _list(_STAGE),
    "takes_random": {"type": "boolean"},
    "step_seconds": _SECONDS,
    "bubble": _SECONDS,
}
PIPELINE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {**_FIELDS, "budget_bytes": _list(_COUNT)},
    "required": list(_FIELDS),
    "additionalProperties": False,
}


_OF_DEVICES = ("sizes", "cuts", "budget_bytes", "peak_bytes", "measured_peak_bytes")


def encode_pipeline(plan: PipelinePlan) -> dict[str, Any]:
    """A plan as JSON data, see `PIPELINE_SCHEMA`."""
    document = {f.name: getattr(plan, f.name) for f in fields(plan)}
    document["schedule"] = {
        **{name: getattr(plan.schedule, name) for name in ("name", "num_stages", "num_microbatches")},
        "orders": [[[a.stage, a.what.value, a.microbatch] for a in order] for order in plan.schedule.orders],
    }
    document |= {name: list(document[name]) for name in _OF_DEVICES if document[name] is not None}
    document |= {name: [_encoded(stage) for stage in document[name]] for name in ("stages", "last_stages")}
    return {name: value for name, value in document.items() if value is not None}


def _encoded(stage: StageProgram) -> dict[str, Any]:
    document = {f.name: getattr(stage, f.name) for f in fields(stage)}
    for name in ("program", "last_program"):
        document[name] = None if document[name] is None else encode_program(document[name])
    document |= {"separated": list(stage.separated), "grid": list(stage.grid)}
    return {name: value for name, value in document.items() if value is not None}


def decode_pipeline(document: object) -> PipelinePlan:
    """The plan in a document.

    Raises:
        PlanFileError: if the document is not a pipeline plan.
    """
    validate(document, PIPELINE_SCHEMA)
    assert isinstance(document, dict)
    values = dict(document)
    schedule = dict(values["schedule"])
    known = {one.value for one in Pass}
    if not all(what in known for order in schedule["orders"] for _, what, _ in order):
        raise PlanFileError("the schedule of the pipeline has an unknown action; the plan is damaged: make it anew")
    orders = tuple(tuple(Action(s, Pass(what), m) for s, what, m in order) for order in schedule["orders"])
    values["schedule"] = Schedule(**{**schedule, "orders": orders})
    values |= {name: tuple(values[name]) for name in _OF_DEVICES if name in values}
    values |= {name: tuple(_decoded(stage) for stage in values[name]) for name in ("stages", "last_stages")}
    return PipelinePlan(**values)


def _decoded(document: Mapping[str, Any]) -> StageProgram:
    values = dict(document)
    for name in ("program", "last_program"):
        if name in values:
            values[name] = decode_program(values[name])
    values |= {name: tuple(values[name]) for name in ("separated", "grid")}
    return StageProgram(**values)
