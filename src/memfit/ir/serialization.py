"""Steps, programs and plans as JSON, for files and for planners in another process.

A document is validated against its published schema (`memfit.ir.schema`) and then against the rules that a schema
cannot state; only then is it turned into objects. `memfit.ir.jsonfile` reads and writes the files.

Known limits: a decoded program is only known to be well formed; `memfit.sim.verifier` says whether it is right for its
step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from memfit.errors import PlanFileError
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind, Variant
from memfit.ir.jsonfile import read_json, validate, write_json
from memfit.ir.program import Action, Instruction, Program
from memfit.ir.schema import GRAPH_SCHEMA, INSTRUCTION_LENGTHS, PLAN_SCHEMA, PROGRAM_SCHEMA, SCHEMA_VERSION
from memfit.ir.slicing import BySlices, Reach
from memfit.ir.tiers import Link, Tier, TierLinks

__all__ = [
    "Decision",
    "PlanFile",
    "Prediction",
    "decode_graph",
    "decode_plan",
    "decode_program",
    "encode_graph",
    "encode_plan",
    "encode_program",
    "fingerprint_difference",
    "graph_digest",
    "load_plan",
    "read_json",
    "save_plan",
    "validate",
    "write_json",
]

_STRUCTURE = (
    *("name", "target", "phase", "subgraph", "reads", "writes"),
    *("in_place_over", "random_state_bytes", "recomputable"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Memory and time that the simulator predicts for a plan, with the lower bound on its overhead where one is known.

    Attributes:
        peak_bytes: highest memory of the step.
        step_seconds: sum of the times of its ops.
        overhead: extra time over the plain step, as a fraction.
        plain_peak_bytes: highest memory of the step without memfit.
        bound_overhead: lower bound on the overhead of any plan, with the tiers it may swap to.
        least_peak_bytes: lower bound on the peak of any program that runs whole ops.
        out_bytes: bytes swapped out.
        in_bytes: bytes swapped in.
        overlap: share of the links' time during which compute goes on.
        stall_seconds: time that compute waits for links.
        host_bytes: most bytes on the host.
        disk_bytes: most bytes on the disk.
    """

    peak_bytes: int
    step_seconds: float
    overhead: float
    plain_peak_bytes: int = 0
    bound_overhead: float | None = None
    least_peak_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    overlap: float = 1.0
    stall_seconds: float = 0.0
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision of a plan on one block: saved results, action of the backward pass in place of the others, and reason.

    Attributes:
        block: the block, such as `1` or `3-4`.
        module: qualified names of the modules that it computes.
        saves: the results that stay in memory until the backward pass, in words.
        saved_bytes: their size.
        later: action of the backward pass in place of the other results, such as `recompute bn1, relu`.
        extra_seconds: time that this action costs.
        reason: why this decision and not a cheaper one.
    """

    block: str
    module: str
    saves: str
    saved_bytes: int
    later: str
    extra_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan in a file.

    Attributes:
        schema_version: version of the file format.
        fingerprint: versions, device, shapes and modules that the plan is for; see `fingerprint_difference`.
        strategy: name of the planner.
        budget_bytes: the budget that it had to fit.
        predicted: its predicted cost.
        graph_digest: digest of the step it belongs to; see `graph_digest`.
        program: the order in which to compute and free.
        grid: numbers of tiles into which samples may be cut; empty if the step is not captured for the lever `tile`.
        decisions: the program in words.
    """

    schema_version: int = SCHEMA_VERSION
    fingerprint: Mapping[str, str | int | list[Any]]
    strategy: str
    budget_bytes: int
    predicted: Prediction
    graph_digest: str
    program: Program
    grid: tuple[int, ...] = ()
    decisions: tuple[Decision, ...] = ()


def _record(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their default, tuples as lists."""
    present = ((f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default)
    return {name: list(item) if isinstance(item, tuple) else item for name, item in present}


def _arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_record`, for a document that satisfies its schema."""
    return {name: tuple(item) if isinstance(item, list) else item for name, item in record.items()}


def encode_graph(graph: StepGraph) -> dict[str, Any]:
    """A step graph as JSON data, see `GRAPH_SCHEMA`."""
    ops = [_op_record(op) for op in graph.ops]
    storages = [{**_record(storage), "kind": str(storage.kind)} for storage in graph.storages]
    document = {**_record(graph), "ops": ops, "storages": storages}
    if graph.tiers:
        document["tiers"] = [_tier_record(links) for links in graph.tiers]
    return document


def _tier_record(links: TierLinks) -> dict[str, Any]:
    return {**_record(links), "tier": str(links.tier), "out": _record(links.out), "into": _record(links.into)}


def _tier(record: Mapping[str, Any]) -> TierLinks:
    fields = {"tier": Tier(record["tier"]), "out": Link(**record["out"]), "into": Link(**record["into"])}
    return TierLinks(**{**record, **fields})


def _op_record(op: Op) -> dict[str, Any]:
    record = {**_record(op), "phase": str(op.phase)}
    if op.variants:
        record["variants"] = [_record(variant) for variant in op.variants]
    if op.plain_variant is not None:
        record["plain_variant"] = _record(op.plain_variant)
    if op.recompute_as is not None:
        record["recompute_as"] = _op_record(op.recompute_as)
    if op.by_slices is not None:
        record["by_slices"] = _record(op.by_slices)
        if op.by_slices.reaches:
            record["by_slices"]["reaches"] = [[_record(reach) for reach in of] for of in op.by_slices.reaches]
    return record


def _op(record: Mapping[str, Any]) -> Op:
    variants = tuple(Variant(**variant) for variant in record.get("variants", ()))
    fields: dict[str, Any] = {"phase": Phase(record["phase"]), "variants": variants}
    if "plain_variant" in record:
        fields["plain_variant"] = Variant(**record["plain_variant"])
    if "recompute_as" in record:
        fields["recompute_as"] = _op(record["recompute_as"])
    if "by_slices" in record:
        slices = _arguments(record["by_slices"])
        reaches = tuple(tuple(Reach(**reach) for reach in of) for of in slices.get("reaches", ()))
        fields["by_slices"] = BySlices(**{**slices, "reaches": reaches})
    return Op(**{**_arguments(record), **fields})


def decode_graph(document: object) -> StepGraph:
    """The step graph in a document.

    Args:
        document: parsed JSON.

    Returns:
        A graph whose ops and storages refer to each other as the docstrings in `memfit.ir.graph` promise.

    Raises:
        PlanFileError: if it is not a step graph.
    """
    validate(document, GRAPH_SCHEMA)
    assert isinstance(document, dict)
    ops = tuple(_op(record) for record in document["ops"])
    storages = tuple(Storage(**{**record, "kind": StorageKind(record["kind"])}) for record in document["storages"])
    tiers = tuple(_tier(record) for record in document.get("tiers", ()))
    graph = StepGraph(**{**_arguments(document), "ops": ops, "storages": storages, "tiers": tiers})
    for problem in _broken_promises(graph):
        raise PlanFileError(f"the step graph is damaged: {problem}; capture the model again")
    return graph


def _broken_promises(graph: StepGraph) -> Iterator[str]:
    """Violations of rules that a schema cannot state: indices exist, and every storage is written once, then read."""
    count = len(graph.storages)
    written = {index for index, storage in enumerate(graph.storages) if storage.kind is StorageKind.STATIC}
    phases = [op.phase for op in graph.ops]
    if phases != sorted(phases, key=list(Phase).index) or phases.count(Phase.LOSS) != 1:
        yield "its ops are not forward ops, one loss op and backward ops, in this order"
    if len({op.name for op in graph.ops}) != len(graph.ops):
        yield "two of its ops have one name"
    for op in graph.ops:
        if any(index >= count for index in (*op.reads, *op.writes, *(op.plain_reads or ()), *op.later.reads)):
            yield f"op {op.name} uses a storage that is not among the {count} of the step"
            return
        if len(set(op.reads)) != len(op.reads) or not written.issuperset((*op.reads, *(op.plain_reads or ()))):
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


def _says_how_it_is_cut(slices: BySlices) -> bool:
    axes = len(slices.grid)
    return (
        len(slices.extents) == axes
        and len(slices.reaches) == len(slices.reads)
        and all(len(of) == axes for of in slices.reaches)
    )


def _size(graph: StepGraph, storage: int) -> int:
    return graph.storages[storage].nbytes


def encode_program(program: Program) -> list[list[str | int]]:
    """A program as JSON data, see `PROGRAM_SCHEMA`."""
    return [_encoded(instruction) for instruction in program.instructions]


def _encoded(instruction: Instruction) -> list[str | int]:
    with_next = "+" if instruction.fused else ""
    if instruction.action is Action.FREE:
        return [f"f{with_next}", instruction.index]
    if instruction.action is Action.SWAP_OUT:
        return [f"o:{instruction.tier}", instruction.index]
    if instruction.action is Action.SWAP_IN:
        return ["i", instruction.index]
    if instruction.action is Action.STREAM:
        return [f"t:{instruction.tier}", instruction.index]
    code = "s" if instruction.sliced else "c"
    if instruction.over is not None:
        return [f"{code}!{with_next}", instruction.index, instruction.chunks, instruction.over]
    return [f"{code}{with_next}", instruction.index, *([instruction.chunks] if instruction.chunks > 1 else [])]


def decode_program(document: object) -> Program:
    """The program in a document.

    Args:
        document: parsed JSON.

    Returns:
        A program; pass it through `memfit.sim.verifier` before use.

    Raises:
        PlanFileError: if it is not a program.
    """
    validate(document, PROGRAM_SCHEMA)
    assert isinstance(document, list)
    return _program(document)


def _program(document: list[list[Any]]) -> Program:
    return Program(instructions=tuple(_decoded(place, entry) for place, entry in enumerate(document)))


def _decoded(place: int, entry: list[Any]) -> Instruction:
    code, index, *rest = entry
    if len(entry) not in INSTRUCTION_LENGTHS[code]:
        raise PlanFileError(
            f"instruction {place} of the program, {entry}, has {len(entry)} entries; the plan is damaged: make it anew"
        )
    fused = code.endswith("+")
    if code.startswith("f"):
        return Instruction(Action.FREE, index, fused=fused)
    if code.startswith("o:"):
        return Instruction(Action.SWAP_OUT, index, tier=Tier(code.removeprefix("o:")))
    if code == "i":
        return Instruction(Action.SWAP_IN, index)
    if code.startswith("t:"):
        return Instruction(Action.STREAM, index, tier=Tier(code.removeprefix("t:")))
    over, chunks = rest[1] if len(rest) > 1 else None, rest[0] if rest else 1
    return Instruction(Action.COMPUTE, index, over, chunks, fused=fused, sliced=code.startswith("s"))


def encode_plan(plan: PlanFile) -> dict[str, Any]:
    """A plan as JSON data, see `PLAN_SCHEMA`."""
    return {
        "schema_version": plan.schema_version,
        **_record(plan),
        "fingerprint": dict(plan.fingerprint),
        "predicted": _record(plan.predicted),
        "program": encode_program(plan.program),
        "decisions": [_record(decision) for decision in plan.decisions],
    }


def decode_plan(document: object) -> PlanFile:
    """The plan in a document.

    Args:
        document: parsed JSON.

    Returns:
        A plan; compare its fingerprint and graph digest, and pass its program through `memfit.sim.verifier`.

    Raises:
        PlanFileError: if it is not a plan.
    """
    validate(document, PLAN_SCHEMA)
    assert isinstance(document, dict)
    return _plan(document)


def _plan(document: Mapping[str, Any]) -> PlanFile:
    fields = {
        "predicted": Prediction(**document["predicted"]),
        "program": _program(document["program"]),
        "decisions": tuple(Decision(**decision) for decision in document.get("decisions", ())),
        "grid": tuple(document.get("grid", ())),
    }
    return PlanFile(**{**document, **fields})


def save_plan(path: str | os.PathLike[str], plan: PlanFile) -> None:
    """Writes a plan file that only its owner can read, and refuses a plan that could not be read back."""
    document = encode_plan(plan)
    validate(document, PLAN_SCHEMA)
    write_json(path, document)


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    """Reads a plan file; see `decode_plan`."""
    return _plan(read_json(path, schema=PLAN_SCHEMA))


def graph_digest(graph: StepGraph) -> str:
    """SHA-256 of the properties that must be equal for a program of one step to be a program of another one.

    Names, targets, edges, sizes and exactness count; measurements (seconds, workspaces, the optimizer's transient
    memory), memory that exists before the step, and labels do not count.
    """
    ops = [[getattr(run, name) for run in (op, op.later) for name in _STRUCTURE] for op in graph.ops]
    storages = [[storage.nbytes, storage.kind] for storage in graph.storages]
    structure = json.dumps([ops, storages, graph.outputs])
    return hashlib.sha256(structure.encode()).hexdigest()


def fingerprint_difference(
    expected: Mapping[str, str | int | list[Any]], found: Mapping[str, str | int | list[Any]]
) -> list[str]:
    """Returns the differences between two fingerprints.

    Args:
        expected: fingerprint of the plan.
        found: fingerprint of the present step.

    Returns:
        One line for each fact that differs, empty if none does.
    """

    def shown(side: Mapping[str, str | int | list[Any]], name: str) -> str:
        return json.dumps(side[name], ensure_ascii=False) if name in side else "nothing"

    facts = [(name, shown(expected, name), shown(found, name)) for name in sorted({*expected, *found})]
    return [f"{name}: planned for {planned}, found {here}" for name, planned, here in facts if planned != here]
