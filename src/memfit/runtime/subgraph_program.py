"""Splits a program among the captured subgraphs: the instructions of each, numbered as in its own joint graph.

A program (`memfit.ir.program`) refers to the ops and storages of the whole step. At run time there is one forward and
one backward graph for each captured subgraph, and each numbers its ops and storages itself.

The technique is a walk over the instructions in order. An op goes to the subgraph in which it was captured, to the
forward pass before the loss and to the backward pass after the loss; what frees or moves a storage goes to the subgraph
that writes it. A forward storage that the backward pass reads before recomputing it is handed over. A digest of ops,
operands and shapes identifies a joint graph, since a graph may be traced again when the plan is compiled.

Known limits: an op runs only in its own subgraph, so values that cross subgraphs are never recomputed elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs

from memfit.capture.training_step import Capture
from memfit.fxir.joint import JointReading
from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.instructions import Compute, Free, Instruction, SwapIn, SwapOut, TierResident, given_up
from memfit.ir.program import Program, are_halves
from memfit.ir.streaming import tier_bytes
from memfit.ops.accumulation import Accumulate
from memfit.runtime.offload.engine import Slot
from memfit.torch_compat.core import pytree

__all__ = ["Run", "SubgraphProgram", "subgraph_programs", "reading_digest"]


Run = tuple[Instruction, ...]
"""Instructions that are emitted together: one, a fused region, or both halves of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgraphProgram:
    """The part of a program that one captured graph runs.

    Attributes:
        digest: of the joint graph that it was made for.
        separated: see `memfit.fxir.joint.JointReading`.
        grid: see `memfit.fxir.joint.JointReading`.
        forward: runs of its forward pass.
        backward: runs of its backward pass.
        replayed: ops whose random state is saved when they run first, and replayed when they are recomputed.
        from_statistics: ops that are recomputed by another call, which reads statistics of the first run.
        kept: local storages handed from the forward to the backward pass.
        held: local storages of results that the caller holds to the end of the step.
        slots: by local storage that goes to a tier, its slot there.
        tier_resident: those of them that are tier-resident and move slice by slice.
        accumulate: how it adds gradients of parameters to `.grad` itself; None if it does not.
        waits_until: number of runs of its backward pass that autograd waits for; None for all.
    """

    digest: str
    separated: frozenset[str]
    grid: tuple[int, ...]
    forward: tuple[Run, ...]
    backward: tuple[Run, ...]
    kept: tuple[int, ...]
    held: frozenset[int] = frozenset()
    replayed: frozenset[int] = frozenset()
    from_statistics: frozenset[int] = frozenset()
    slots: Mapping[int, Slot] = field(default_factory=dict)
    tier_resident: frozenset[int] = frozenset()
    accumulate: Accumulate | None = None
    waits_until: int | None = None


@dataclass(slots=True)
class _Part:
    """The part of a program that goes to one subgraph, while it is collected.

    Attributes:
        ops: numbers of its ops in its joint graph, by their numbers in the step.
        storages: the same for storages that its ops write.
        held: its storages of results that the caller holds.
        written_back: its storages that the backward pass has in memory without the forward pass.
        goes_on: whether the next instruction belongs to the last run.
    """

    ops: dict[int, int] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    forward: list[Run] = field(default_factory=list)
    backward: list[Run] = field(default_factory=list)
    goes_on: bool = False
    kept: dict[int, None] = field(default_factory=dict)
    written_back: set[int] = field(default_factory=set)
    waits_until: int | None = None

    def add(self, instruction: Instruction, *, past_loss: bool, with_next: bool = False) -> None:
        """Adds an instruction in its own numbers, to the last run if that goes on."""
        runs = self.backward if past_loss else self.forward
        before = runs.pop() if self.goes_on else ()
        runs.append((*before, instruction))
        self.goes_on = instruction.fused or with_next

    def localized(self, instruction: Instruction) -> Instruction:
        """The instruction, numbered as in the joint graph."""
        if isinstance(instruction, Compute):
            over = None if instruction.over is None else self.storages.get(instruction.over)
            return structs.replace(instruction, op=self.ops[instruction.op], over=over)
        return structs.replace(instruction, storage=self.storages[instruction.storage])


def subgraph_programs(capture: Capture, program: Program) -> tuple[SubgraphProgram, ...]:
    """Splits a program among the subgraphs of its capture.

    Args:
        capture: the captured step.
        program: a checked program of that step.

    Returns:
        One subgraph program for each subgraph.
    """
    graph = capture.graph
    parts = _parts(capture)
    part_of = {storage: part for part in parts for storage in part.storages}
    past_loss = False
    seen: set[int] = set()
    for place, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Compute):
            _add_transfer(instruction, part_of, past_loss=past_loss)
            continue
        index = instruction.op
        op, joint = graph.ops[index], capture.joint_ops[index]
        past_loss = past_loss or op.phase is Phase.LOSS
        if joint is None:
            continue
        part = parts[op.subgraph]
        run = part.localized(instruction)
        again = index in seen
        seen.add(index)
        following = program.instructions[place + 1] if place + 1 < len(program.instructions) else None
        part.add(run, past_loss=past_loss, with_next=_runs_with_next(capture, instruction, following))
        if not past_loss:
            continue
        storages = capture.subgraphs.subgraphs[op.subgraph].reading.storages
        from_statistics = again and op.recompute_as is not None
        reads, writes = (joint.recompute_reads, joint.writes[:1]) if from_statistics else (joint.reads, joint.writes)
        over = given_up(run)
        for storage in reads if over is None else (*reads, over):
            if storages[storage].kind is StorageKind.FORWARD and storage not in part.written_back:
                part.kept[storage] = None
        part.written_back.update(s for s in writes if s not in part.held)
        if capture.deferred and op.phase is Phase.BACKWARD and index not in capture.deferred:
            part.waits_until = len(part.backward)
    for storage in program.tier_resident():
        part_of[storage].kept.pop(part_of[storage].storages[storage], None)
    # A gradient may itself be a forward result.
    for part, subgraph in zip(parts, capture.subgraphs.subgraphs, strict=True):
        for storage in subgraph.reading.gradient_storages:
            if subgraph.reading.storages[storage].kind is StorageKind.FORWARD:
                part.kept[storage] = None
    return tuple(
        _made(part, subgraph.reading, program, graph)
        for part, subgraph in zip(parts, capture.subgraphs.subgraphs, strict=True)
    )


def _made(part: _Part, reading: JointReading, program: Program, graph: StepGraph) -> SubgraphProgram:
    recomputed = set(program.recomputed())
    swapped = {s: (tier, graph.storages[s].nbytes) for s, tier in program.swapped().items()}
    tier_resident = {s: (tier, tier_bytes(graph, s)) for s, tier in program.tier_resident().items()}
    return SubgraphProgram(
        digest=reading_digest(reading),
        separated=reading.separated,
        grid=reading.grid,
        forward=tuple(part.forward),
        backward=tuple(part.backward),
        kept=tuple(part.kept),
        held=part.held,
        replayed=frozenset(part.ops[i] for i in recomputed & part.ops.keys() if graph.ops[i].random_state_bytes),
        from_statistics=frozenset(own for i, own in part.ops.items() if graph.ops[i].recompute_as is not None),
        slots={
            part.storages[s]: Slot(tier=tier, nbytes=nbytes)
            for s, (tier, nbytes) in (swapped | tier_resident).items()
            if s in part.storages
        },
        tier_resident=frozenset(part.storages[s] for s in tier_resident if s in part.storages),
        accumulate=_accumulation(reading),
        waits_until=part.waits_until,
    )


def _parts(capture: Capture) -> list[_Part]:
    """For each subgraph an empty part, with its own numbers of the ops and storages of the step."""
    parts = [_Part() for _ in capture.subgraphs.subgraphs]
    number_of = {op.node: i for subgraph in capture.subgraphs.subgraphs for i, op in enumerate(subgraph.reading.ops)}
    for index, (op, joint) in enumerate(zip(capture.graph.ops, capture.joint_ops, strict=True)):
        if joint is not None:
            parts[op.subgraph].ops[index] = number_of[joint.node]
            parts[op.subgraph].storages.update(zip(op.writes, joint.writes, strict=True))
    for part in parts:
        part.held = frozenset(part.storages[s] for s in capture.graph.outputs if s in part.storages)
    return parts


def _add_transfer(
    instruction: Free | SwapOut | SwapIn | TierResident, part_of: Mapping[int, _Part], *, past_loss: bool
) -> None:
    """Adds an instruction that is no op to the part that its storage belongs to, if it belongs to one."""
    part = part_of.get(instruction.storage)
    if part is None or isinstance(instruction, TierResident):
        return
    part.add(part.localized(instruction), past_loss=past_loss)
    if past_loss and isinstance(instruction, SwapIn):
        part.written_back.add(part.storages[instruction.storage])


def _runs_with_next(capture: Capture, instruction: Compute, following: Instruction | None) -> bool:
    """Whether an instruction and the next one are the halves of a call and run in the same part of the pass."""
    if not isinstance(following, Compute) or not are_halves(capture.graph, instruction, following):
        return False
    return (instruction.op in capture.deferred) == (following.op in capture.deferred)


def _accumulation(reading: JointReading) -> Accumulate | None:
    if reading.as_made:
        return Accumulate.AS_MADE
    return Accumulate.WHOLE if reading.accumulated else None


def reading_digest(reading: JointReading) -> str:
    """Digest that identifies a joint graph by its ops, operands and shapes.

    It excludes the sizes of storages: a tensor that fake tensors cache may have a larger storage the first time.
    """
    lines = [
        f"{op.node.name} {op.node.target} {op.reads} {op.writes} {op.in_place_over} {op.recomputable}"
        for op in reading.ops
    ]
    lines += [f"{s.base.name} {s.kind} {_layouts(s.base.meta.get('val'))}" for s in reading.storages]
    return hashlib.sha256("\\n".join(lines).encode()).hexdigest()


def _layouts(value: Any) -> str:
    """Shapes, strides and dtypes of the tensors that a node returns."""
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return " ".join(f"{tuple(t.shape)} {t.stride()} {t.dtype}" for t in tensors)
