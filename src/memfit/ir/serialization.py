"""Steps as parsed JSON, for planners in another process, and a digest of steps.

A document is validated against the types of the fields of its records (`memfit.ir.jsonfile`) and then against the rules
that types cannot state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from memfit.errors import PlanFileError
from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.jsonfile import as_document, record_of
from memfit.ir.slicing import BySlices

__all__ = ["decode_graph", "encode_graph", "graph_digest"]

_STRUCTURE = (
    *("target", "phase", "subgraph", "reads", "writes"),
    *("in_place_over", "random_state_bytes", "recomputable"),
)


def encode_graph(graph: StepGraph) -> Any:
    """A step graph as JSON data."""
    return as_document(graph)


def decode_graph(document: object) -> StepGraph:
    """The step graph in a document.

    Args:
        document: parsed JSON.

    Returns:
        A graph whose ops and storages refer to each other as the docstrings in `memfit.ir.graph` promise.

    Raises:
        PlanFileError: if it is not a step graph.
    """
    graph = record_of(document, StepGraph)
    for problem in _broken_promises(graph):
        raise PlanFileError(f"the step graph is damaged: {problem}; capture the model again")
    return graph


def _broken_promises(graph: StepGraph) -> Iterator[str]:
    """Violations of rules that types cannot state: indices exist, and every storage is written once, then read."""
    count = len(graph.storages)
    written = {index for index, storage in enumerate(graph.storages) if storage.kind is StorageKind.STATIC}
    phases = [op.phase for op in graph.ops]
    if phases != sorted(phases, key=list(Phase).index) or phases.count(Phase.LOSS) != 1:
        yield "its ops are not forward ops, one loss op and backward ops, in this order"
    if len({op.name for op in graph.ops}) != len(graph.ops):
        yield "two of its ops have one name"
    if any(storage.stream is not None for storage in graph.storages):
        yield "a storage is tier-resident, which only a plan can say"
    for op in graph.ops:
        if op.recompute_as is not None and op.recompute_as.recompute_as is not None:
            yield f"op {op.name} is recomputed as an op that is itself recomputed as another one"
            return
        if op.estimated_seconds is not None:
            yield f"op {op.name} has an estimated time, which only a planner sets"
        later = (*op.later.reads, *op.later.writes, *op.later.in_place_over)
        if any(index >= count for index in (*op.reads, *op.writes, *later)):
            yield f"op {op.name} uses a storage that is not among the {count} of the step"
            return
        if len(set(op.reads)) != len(op.reads) or not written.issuperset(op.reads):
            yield f"op {op.name} reads a storage twice or before it is written"
        if op.variants and op.variant(op.chunks) not in op.variants:
            yield f"op {op.name} runs in {op.chunks} chunks, which is none of its variants"
        if len(set(op.writes)) != len(op.writes) or not written.isdisjoint(op.writes):
            yield f"op {op.name} writes a storage that is static or already written"
        written.update(op.writes)
        slices = op.later.by_slices
        if slices is not None and not {*op.later.reads}.issuperset(slices.reads):
            yield f"op {op.name} reads samples of what it does not read"
        if slices is not None and not {*op.later.writes}.issuperset(slices.sums):
            yield f"op {op.name} adds up what it does not write"
        if slices is not None and slices.grid and not _says_how_it_is_cut(slices):
            yield f"op {op.name} runs in tiles of it does not say what"
        if not {*op.writes}.issuperset(op.later.writes) or not written.issuperset(op.later.reads):
            yield f"op {op.name} is recomputed with other results or from what is not there"
        for over in op.in_place_over:
            if over not in op.reads or not op.writes or _size(graph, over) != _size(graph, op.writes[0]):
                yield f"op {op.name} cannot run in place over storage {over}"
    if len(written) != count:
        yield f"{count - len(written)} storages are never written"
    if any(index >= count for index in graph.outputs):
        yield f"an output is not among the {count} storages of the step"
    if graph.baseline is not None:
        yield from (f"without memfit, {problem}" for problem in _broken_promises(graph.without_memfit()))
        for op in graph.baseline.ops:
            other_ways = (op.variants, op.in_place_over, op.in_place_seconds, op.recompute_as, op.by_slices)
            if any(way not in (None, ()) for way in other_ways):
                yield f"op {op.name} runs in more than one way without memfit"


def _says_how_it_is_cut(slices: BySlices) -> bool:
    axes = len(slices.grid)
    return (
        len(slices.extents) == axes
        and len(slices.reaches) == len(slices.reads)
        and all(len(of) == axes for of in slices.reaches)
    )


def _size(graph: StepGraph, storage: int) -> int:
    return graph.storages[storage].nbytes


def graph_digest(graph: StepGraph) -> str:
    """SHA-256 of the properties that must be equal for a program of one step to be a program of another one.

    Names, targets, edges, sizes and exactness count; measurements (seconds, workspaces, the optimizer's transient
    memory), memory that exists before the step, and labels do not count. Nor does the number at the end of a name: a
    graph that was traced with symbols for sizes numbers its ops in another way.
    """
    ops = [
        [(_without_number(run.name), *(getattr(run, fact) for fact in _STRUCTURE)) for run in (op, op.later)]
        for op in graph.ops
    ]
    storages = [[storage.nbytes, storage.kind] for storage in graph.storages]
    structure = json.dumps([ops, storages, graph.outputs])
    return hashlib.sha256(structure.encode()).hexdigest()


def _without_number(name: str) -> str:
    """`add` for an op that is called `add_3`."""
    return name.rstrip("0123456789").removesuffix("_")
