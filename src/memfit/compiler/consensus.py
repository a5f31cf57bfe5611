"""Decisions that the processes of a sharded module agree on before one of them goes on.

Every forward pass of such a module is a collective, so all processes must capture and prove equally often. Therefore
all processes use the costs and programs of the first process and fail if it fails, and a peak is the largest of all
processes.

Known limits: all processes must reach these decisions together. A process that alone sees a new input shape waits for
the others, and the others wait for a process that runs out of memory while it measures, until the process group gives
up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs
from torch import nn

from memfit.capture.distributed.fsdp import mesh_groups
from memfit.capture.training_step import device_of
from memfit.distributed import process_group as processes
from memfit.errors import BudgetError, CaptureError, MemfitError, PlanMismatchError
from memfit.ir.graph import StepGraph
from memfit.ir.jsonfile import as_document, record_of
from memfit.ir.program import Program
from memfit.ir.serialization import decode_graph, encode_graph, graph_digest

__all__ = ["agreed_peak", "agreed_program", "agreed_start", "agreed_step"]


def agreed_start(model: nn.Module, check: Callable[[], None]) -> None:
    """Checks whether this process can capture the model, before any process waits for another's forward pass.

    Raises:
        CaptureError: if this process cannot capture it.
        PipelineError: if another process cannot capture it, where the module is sharded.
    """
    error: Exception | None = None
    try:
        check()
    except CaptureError as raised:
        error = raised
    groups = mesh_groups(model)
    if groups:
        processes.agree(error, device_of(model), groups)
    elif error is not None:
        raise error


def agreed_step(model: nn.Module, graph: StepGraph, device: torch.device) -> StepGraph:
    """The step with the first process's costs, where the module is sharded.

    Raises:
        PlanMismatchError: if the step of the first process differs from the step here.
        PipelineError: if the step differs on another process.
    """
    groups = mesh_groups(model)
    if not groups:
        return graph
    theirs = decode_graph(processes.send_document(encode_graph(graph), device, groups))
    differs = graph_digest(theirs) != graph_digest(graph)
    error = PlanMismatchError(
        "the first process trains on another step: inputs of other shapes, or another model"
        f" ({_first_difference(theirs, graph)})"
    )
    processes.agree(error if differs else None, device, groups)
    return structs.replace(theirs, label=graph.label)


def _first_difference(theirs: StepGraph, ours: StepGraph) -> str:
    """The first difference between two steps, in words."""
    if len(theirs.ops) != len(ours.ops):
        return f"it has {len(theirs.ops)} ops, not {len(ours.ops)}"
    for one, other in zip(theirs.ops, ours.ops, strict=True):
        if (one.name, one.target, one.reads, one.writes) != (other.name, other.target, other.reads, other.writes):
            return f"its op {one.name} is {other.name} here, or touches other storages"
    for one_storage, other_storage in zip(theirs.storages, ours.storages, strict=False):
        if one_storage.nbytes != other_storage.nbytes:
            return f"its {one_storage.name} takes {one_storage.nbytes} bytes, not {other_storage.nbytes}"
    return "an op of it runs in another way"


def agreed_program(
    model: nn.Module, find: Callable[[], tuple[Program, float]], device: torch.device
) -> tuple[Program, float]:
    """The program that the first process finds, where the module is sharded, and the bound of its time.

    Raises:
        BudgetError: if the first process finds none.
        MemfitError: if the first process fails otherwise.
    """
    groups = mesh_groups(model)
    if not groups:
        return find()
    document: Any = None
    if processes.is_first(groups):
        try:
            program, bound_seconds = find()
            document = {"program": as_document(program), "bound_seconds": bound_seconds}
        except BudgetError as error:
            document = {
                "error": str(error),
                "budget": {
                    "budget_bytes": error.budget_bytes,
                    "least_bytes": error.least_bytes,
                    "missed_bytes": error.missed_bytes,
                },
                "words": {"binding": error.binding, "subject": error.subject, "advice": error.advice},
            }
        except Exception as error:
            document = {"error": f"the first process cannot plan: {type(error).__name__}: {error}"}
    document = processes.send_document(document, device, groups)
    if "budget" in document:
        raise BudgetError(document["error"], **document["budget"], **document["words"])
    if "error" in document:
        raise MemfitError(document["error"])
    return record_of(document["program"], Program), float(document["bound_seconds"])


def agreed_peak(model: nn.Module, peak_bytes: int) -> int:
    """The largest peak of all processes, where the module is sharded."""
    groups = mesh_groups(model)
    if not groups:
        return peak_bytes
    return processes.largest(peak_bytes, device_of(model), groups)
