"""Splits a program among the captured subgraphs: the instructions of each, numbered as in its own joint graph.

A program (`memfit.ir.program`) refers to the ops and storages of the whole step. At run time there is one forward and
one backward graph for each captured subgraph, and each numbers its ops and storages itself.

The technique is a walk over the instructions in order. An op goes to the subgraph in which it was captured, to the
forward pass before the loss and to the backward pass after the loss. Its place determines its marks: whether the op is
recomputed, restores a random state, is fused with the next op, or is half of a call. A forward storage that the
backward pass reads before recomputing it is handed over. A digest of ops, operands and shapes identifies a joint graph,
since a graph may be traced again when the plan is compiled.

Known limits: an op runs only in its own subgraph, so values that cross subgraphs are never recomputed elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.training_step import Capture
from memfit.fxir.joint import JointReading
from memfit.ir.graph import Phase, StorageKind
from memfit.ir.instructions import Compute, Instruction, SwapIn, SwapOut, computes_in, freed_in, given_up
from memfit.ir.program import Program, are_halves
from memfit.ir.streaming import tier_bytes
from memfit.ops.accumulation import Accumulate
from memfit.runtime.emitter import LocalInstruction, LocalMove, Move
from memfit.runtime.offload.engine import Slot
from memfit.torch_compat.core import pytree

__all__ = ["SubgraphProgram", "subgraph_programs", "reading_digest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgraphProgram:
    """The part of a program that one captured graph runs.

    Attributes:
        digest: of the joint graph that it was made for.
        separated: see `memfit.fxir.joint.JointReading`.
        grid: see `memfit.fxir.joint.JointReading`.
        forward: instructions of its forward pass.
        backward: instructions of its backward pass.
        kept: local storages handed from the forward to the backward pass.
        held: local storages of results that the caller holds to the end of the step.
        slots: by local storage that goes to a tier, its slot there.
        tier_resident: those of them that are tier-resident and move slice by slice.
        accumulate: how it adds gradients of parameters to `.grad` itself; None if it does not.
        waits_until: number of instructions of its backward pass that autograd waits for; None for all.
    """

    digest: str
    separated: frozenset[str]
    grid: tuple[int, ...]
    forward: tuple[LocalInstruction | LocalMove, ...]
    backward: tuple[LocalInstruction | LocalMove, ...]
    kept: tuple[int, ...]
    held: frozenset[int] = frozenset()
    slots: Mapping[int, Slot] = field(default_factory=dict)
    tier_resident: frozenset[int] = frozenset()
    accumulate: Accumulate | None = None
    waits_until: int | None = None


def subgraph_programs(capture: Capture, program: Program) -> tuple[SubgraphProgram, ...]:
    """Splits a program among the subgraphs of its capture.

    Args:
        capture: the captured step.
        program: a checked program of that step.

    Returns:
        One subgraph program for each subgraph.
    """
    graph = capture.graph
    local_op = {id(op): i for subgraph in capture.subgraphs.subgraphs for i, op in enumerate(subgraph.reading.ops)}
    recomputed = set(program.recomputed())
    count = len(capture.subgraphs.subgraphs)
    forward: list[list[LocalInstruction | LocalMove]] = [[] for _ in range(count)]
    backward: list[list[LocalInstruction | LocalMove]] = [[] for _ in range(count)]
    kept: list[dict[int, None]] = [{} for _ in range(count)]
    past_loss = False
    waits_until: list[int | None] = [None] * count
    seen: set[int] = set()
    leaving: set[int] = set()
    written_back: list[set[int]] = [set() for _ in range(count)]
    fused, passed_on = _fused(program)
    local = _local_storages(capture)
    held = [frozenset(numbers[s] for s in graph.outputs if s in numbers) for numbers in local]
    subgraph_of = {s: op.subgraph for op in graph.ops for s in op.writes}

    def move(kind: Move, storage: int) -> None:
        subgraph = subgraph_of[storage]
        (backward if past_loss else forward)[subgraph].append(LocalMove(kind, local[subgraph][storage]))
        if past_loss and kind is Move.IN:
            written_back[subgraph].add(local[subgraph][storage])

    position = -1
    for place, instruction in enumerate(program.instructions):
        gone = given_up(instruction)
        if gone in leaving:
            assert gone is not None
            leaving.discard(gone)
            move(Move.GONE, gone)
        if isinstance(instruction, SwapOut):
            leaving.add(instruction.storage)
            move(Move.OUT, instruction.storage)
        elif isinstance(instruction, SwapIn):
            move(Move.IN, instruction.storage)
        if not isinstance(instruction, Compute):
            continue
        position += 1
        index = instruction.op
        following = program.instructions[place + 1] if place + 1 < len(program.instructions) else None
        op, joint = graph.ops[index], capture.joint_ops[index]
        past_loss = past_loss or op.phase is Phase.LOSS
        if joint is None:
            continue
        random = op.random_state_bytes > 0 and index in recomputed
        from_statistics = index in seen and op.recompute_as is not None
        run = LocalInstruction(
            index=local_op[id(joint)],
            recomputed=index in seen,
            over=local[op.subgraph].get(instruction.over),
            chunks=instruction.chunks,
            from_statistics=from_statistics,
            save_state=random and index not in seen,
            replay=random and index in seen,
            fused=fused[position],
            sliced=instruction.sliced,
            passed_on=tuple(local[op.subgraph][s] for s in passed_on[position]),
            with_next=_runs_with_next(capture, instruction, following),
        )
        seen.add(index)
        if not past_loss:
            forward[op.subgraph].append(run)
            continue
        storages = capture.subgraphs.subgraphs[op.subgraph].reading.storages
        reads, writes = (joint.recompute_reads, joint.writes[:1]) if from_statistics else (joint.reads, joint.writes)
        for storage in reads if run.over is None else (*reads, run.over):
            if storages[storage].kind is StorageKind.FORWARD and storage not in written_back[op.subgraph]:
                kept[op.subgraph][storage] = None
        written_back[op.subgraph].update(s for s in writes if s not in held[op.subgraph])
        backward[op.subgraph].append(run)
        if capture.deferred and op.phase is Phase.BACKWARD and index not in capture.deferred:
            waits_until[op.subgraph] = len(backward[op.subgraph])
    for storage in program.tier_resident():
        kept[subgraph_of[storage]].pop(local[subgraph_of[storage]][storage], None)
    swapped = {s: (tier, graph.storages[s].nbytes) for s, tier in program.swapped().items()}
    tier_resident = {s: (tier, tier_bytes(graph, s)) for s, tier in program.tier_resident().items()}
    # A gradient may itself be a forward result.
    for index, subgraph in enumerate(capture.subgraphs.subgraphs):
        for storage in subgraph.reading.gradient_storages:
            if subgraph.reading.storages[storage].kind is StorageKind.FORWARD:
                kept[index][storage] = None
    return tuple(
        SubgraphProgram(
            digest=reading_digest(subgraph.reading),
            separated=subgraph.reading.separated,
            grid=subgraph.reading.grid,
            forward=tuple(forward[i]),
            backward=tuple(backward[i]),
            kept=tuple(kept[i]),
            held=held[i],
            slots={
                local[i][s]: Slot(tier=tier, nbytes=nbytes)
                for s, (tier, nbytes) in (swapped | tier_resident).items()
                if subgraph_of[s] == i
            },
            tier_resident=frozenset(local[i][s] for s in tier_resident if subgraph_of[s] == i),
            accumulate=_accumulation(subgraph.reading),
            waits_until=waits_until[i],
        )
        for i, subgraph in enumerate(capture.subgraphs.subgraphs)
    )


def _runs_with_next(capture: Capture, instruction: Compute, following: Instruction | None) -> bool:
    """Whether an instruction and the next one are the halves of a call and run in the same part of the pass."""
    if not isinstance(following, Compute) or not are_halves(capture.graph, instruction, following):
        return False
    return (instruction.op in capture.deferred) == (following.op in capture.deferred)


def _accumulation(reading: JointReading) -> Accumulate | None:
    if reading.as_made:
        return Accumulate.AS_MADE
    return Accumulate.WHOLE if reading.accumulated else None


def _fused(program: Program) -> tuple[list[bool], list[list[int]]]:
    """For each op in order, whether it is fused with the next op, and the storages that are freed within its region."""
    fused: list[bool] = []
    passed_on: list[list[int]] = []
    for run in program.runs():
        computes = len(computes_in(run))
        fused += [place < computes - 1 for place in range(computes)]
        passed_on += [[] for _ in range(computes)]
        if computes and len(run) > 1:
            passed_on[-1] = freed_in(run)
    return fused, passed_on


def _local_storages(capture: Capture) -> list[dict[int | None, int]]:
    """For each subgraph, its local storage numbers by the storages of the step."""
    local: list[dict[int | None, int]] = [{} for _ in capture.subgraphs.subgraphs]
    for op, joint in zip(capture.graph.ops, capture.joint_ops, strict=True):
        if joint is not None:
            local[op.subgraph].update(zip(op.writes, joint.writes, strict=True))
    return local


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
