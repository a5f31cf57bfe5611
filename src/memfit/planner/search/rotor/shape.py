"""Shape of a run of blocks: its ops and storages in a numbering of their own, so that equal runs are solved once.

A `Shape` is a few blocks of the chain cut out of the step: forward ops, backward ops, and the storages that come in,
that must go out, or that stay in the blocks. It is hashable and does not know its place in the step, hence sixteen
equal residual units are one shape.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memfit.ir.graph import StepGraph, StorageKind
from memfit.planner.analysis.chain import Chain

__all__ = ["Shape", "ShapeOp", "cone", "profile", "shape_of"]


@dataclass(frozen=True, slots=True)
class ShapeOp:
    """An op in the numbering of its shape; static, pinned and foreign storages are left out."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    over: int
    workspace: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A run of blocks.

    Attributes:
        ops: forward ops, then backward ops.
        forward: number of forward ops.
        sizes: bytes by storage; 0 for the boundary before the run, which the user of the shape counts.
        makers: the forward op that writes a storage, -1 for none.
        given: the boundary before the run.
        out: the boundary after the run, without storages of the boundary before the run.
        arriving: backward storages alive before the first backward op.
        leaving: backward storages alive after the last one.
    """

    ops: tuple[ShapeOp, ...]
    forward: int
    sizes: tuple[int, ...]
    makers: tuple[int, ...]
    given: tuple[int, ...]
    out: tuple[int, ...]
    arriving: tuple[int, ...]
    leaving: tuple[int, ...]


def shape_of(graph: StepGraph, chain: Chain, lasts: Sequence[int], start: int, stop: int) -> Shape:
    """Cuts blocks `start` to `stop` (exclusive) out of the step.

    Args:
        graph: the step.
        chain: its blocks.
        lasts: by storage, the last op of the baseline step that reads it (or the number of ops if it is held).
        start: first block.
        stop: the block after the last one.
    """
    first, last = chain.blocks[start], chain.blocks[stop - 1]
    forward = range(first.first, last.last + 1)
    backward = range(last.backward_first, first.backward_stop)
    made = {s for i in forward for s in graph.ops[i].writes if s not in chain.pinned}
    number = {s: n for n, s in enumerate(first.boundary)}

    def local(storages: Collection[int]) -> tuple[int, ...]:
        kept = [s for s in storages if s in number or s in made or graph.storages[s].kind in _GRADIENTS]
        for s in kept:
            number.setdefault(s, len(number))
        return tuple(number[s] for s in kept)

    ops = []
    for index in [*forward, *backward]:  # a list, since mypy infers no types from a tuple
        op = graph.ops[index]
        reads, writes = local(op.reads), local(op.writes)
        over = next((number[s] for s in op.in_place_over if s in number), -1)
        over = over if writes and op.writes[0] in number else -1
        ops.append(ShapeOp(reads, writes, over, op.workspace_bytes, op.recompute_seconds))
    names = list(number)
    written_in_backward = {s for i in backward for s in graph.ops[i].writes}
    makers = [-1] * len(names)
    for position, op_ in enumerate(ops[: len(forward)]):
        for s in op_.writes:
            makers[s] = position
    gradients = [n for n, s in enumerate(names) if graph.storages[s].kind in _GRADIENTS]
    after = chain.boundary_after(stop - 1)
    return Shape(
        ops=tuple(ops),
        forward=len(forward),
        sizes=tuple(0 if n < len(first.boundary) else graph.storages[s].nbytes for n, s in enumerate(names)),
        makers=tuple(makers),
        given=tuple(range(len(first.boundary))),
        out=tuple(number[s] for s in after if s in made),
        arriving=tuple(n for n in gradients if names[n] not in written_in_backward),
        leaving=tuple(n for n in gradients if lasts[names[n]] >= first.backward_stop),
    )


def profile(shape: Shape, sequence: Sequence[int], wanted: Collection[int]) -> tuple[list[int], set[int]]:
    """Memory while each op of a sequence runs, and the storages that must be alive before the sequence.

    The model is that of `memfit.sim.simulator`: operands die at their last read; ops run in place where allowed.

    Args:
        shape: the run of blocks.
        sequence: its ops.
        wanted: storages alive at the end.
    """
    sizes, ops = shape.sizes, shape.ops
    needed = set(wanted)
    live = sum(sizes[s] for s in needed)
    bytes_at: list[int] = []
    for index in reversed(sequence):
        op = ops[index]
        live += op.workspace
        here = live
        for s in op.writes:
            if s in needed:
                live -= sizes[s]
            else:
                here += sizes[s]
        keeps_first = bool(op.writes) and op.writes[0] in needed
        needed.difference_update(op.writes)
        for s in op.reads:
            if s not in needed:
                needed.add(s)
                live += sizes[s]
                if s != op.over or not keeps_first:
                    here += sizes[s]
        live -= op.workspace
        bytes_at.append(here)
    bytes_at.reverse()
    return bytes_at, needed


def cone(shape: Shape, storages: Collection[int], alive: Collection[int]) -> list[int]:
    """The forward ops to recompute for storages, in order; storages made elsewhere are taken as present."""
    ops: set[int] = set()
    stack = [s for s in storages if s not in alive]
    while stack:
        index = shape.makers[stack.pop()]
        if index >= 0 and index not in ops:
            ops.add(index)
            stack.extend(s for s in shape.ops[index].reads if s not in alive)
    return sorted(ops)


_GRADIENTS = (StorageKind.TANGENT, StorageKind.BACKWARD, StorageKind.GRADIENT)
