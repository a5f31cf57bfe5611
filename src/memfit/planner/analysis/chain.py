"""The forward pass cut into a chain of blocks at its narrow places.

Planning a whole step at once is exponential; planning a chain is not. A cut lies between two forward ops. Its
**boundary** consists of the live storages that later forward ops read: with these storages the rest of the forward pass
can be recomputed. Good cuts are narrow. Long skips (U-Net, DenseNet, residual streams) do not forbid a cut: they are
**carried** across the cut as members of its boundary. A storage in the boundaries of several cuts is one storage, so a
plan counts it once.

Every cut of the forward pass has a counterpart in the backward pass: the first backward op that needs a storage made
before the cut and not in its boundary. The backward ops between the counterparts of two cuts belong to the block
between the cuts, so the storages that the backward pass of a block reads are known exactly.

Idea: the sequentialisation of Rockmate (Zhao et al., ICML 2023), with carried storages instead of articulation
points only.

Known limits: ops keep the order of the capture, so a graph whose parallel branches are interleaved has wide
boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.graph import Phase, StepGraph, StorageKind

__all__ = ["Block", "Chain", "cut_chain", "pinned_storages"]

_TINY = 1 / 1024
"""Storages that together are less than this share of all forward bytes are too small to plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of forward ops between two cuts, with its backward ops.

    Attributes:
        first: its first forward op.
        last: its last forward op.
        backward_first: its first backward op.
        backward_stop: the op after its last backward op; equal to `backward_first` if it has none.
        boundary: storages alive before `first` that `first` or later forward ops read.
        carried: the part of the boundary that later blocks read as well.
    """

    first: int
    last: int
    backward_first: int
    backward_stop: int
    boundary: tuple[int, ...]
    carried: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The blocks of a step in forward order; the loss op belongs to the backward ops of the last one.

    Attributes:
        blocks: at least one.
        pinned: forward storages that no plan drops: see `pinned_storages`.
    """

    blocks: tuple[Block, ...]
    pinned: frozenset[int]

    def boundary_after(self, index: int) -> tuple[int, ...]:
        """Boundary at the end of a block; empty after the last one."""
        return self.blocks[index + 1].boundary if index + 1 < len(self.blocks) else ()


def cut_chain(graph: StepGraph, *, most: int = 64) -> Chain:
    """Cuts the forward pass into blocks.

    Args:
        graph: the step.
        most: largest number of blocks.

    Returns:
        The chain.
    """
    pinned = pinned_storages(graph)
    boundaries = _boundaries(graph, pinned)
    cuts = [0, *_choose(graph, pinned, boundaries, most)]
    counterparts = _counterparts(graph, pinned, cuts)
    stops = [*cuts[1:], graph.loss_index]
    befores = [*counterparts[1:], graph.loss_index]
    blocks = tuple(
        Block(
            first=first,
            last=stop - 1,
            backward_first=before,
            backward_stop=counterpart,
            boundary=boundaries[first],
            carried=tuple(s for s in boundaries[first] if stop < len(boundaries) and s in boundaries[stop]),
        )
        for first, stop, before, counterpart in zip(cuts, stops, befores, counterparts, strict=True)
    )
    return Chain(blocks=blocks, pinned=pinned)


def pinned_storages(graph: StepGraph) -> frozenset[int]:
    """Forward storages that no plan drops.

    The caller holds them, or their op cannot be recomputed, or they are so small (batch statistics) that all of them
    together are less than a thousandth of the forward bytes.
    """
    held = graph.held_to_the_end()
    forward = {i: s.nbytes for i, s in enumerate(graph.storages) if s.kind is StorageKind.FORWARD}
    pinned = {s for s in forward if s in held} | graph.lasting()
    pinned.update(s for op in graph.ops if op.phase is Phase.FORWARD and not op.recomputable for s in op.writes)
    room = sum(forward.values()) * _TINY
    for storage in sorted(forward.keys() - pinned, key=lambda s: forward[s]):
        room -= forward[storage]
        if room < 0:
            break
        pinned.add(storage)
    return frozenset(pinned & forward.keys())


def _boundaries(graph: StepGraph, pinned: frozenset[int]) -> list[tuple[int, ...]]:
    """For each forward op, the storages alive before it that this op or a later forward op reads."""
    forward = graph.ops[: graph.loss_index]
    born = {s: index for index, op in enumerate(forward) for s in op.writes if s not in pinned}
    last = {s: index for index, op in enumerate(forward) for s in op.reads if s in born}
    alive: dict[int, None] = {}
    boundaries: list[tuple[int, ...]] = []
    for index, op in enumerate(forward):
        boundaries.append(tuple(alive))
        for s in op.reads:
            if last.get(s) == index:
                alive.pop(s, None)
        alive.update((s, None) for s in op.writes if last.get(s, -1) > index)
    return boundaries


def _choose(graph: StepGraph, pinned: frozenset[int], boundaries: list[tuple[int, ...]], most: int) -> list[int]:
    """The places to cut.

    The worth of a cut is the bytes made in the block before it, times the bytes made in the block after it, divided by
    the square of its width. The cut of least worth is removed until every worth is at least 1 and the blocks are few
    enough.
    """
    size = [s.nbytes for s in graph.storages]
    widths = [sum(size[s] for s in boundary) for boundary in boundaries]
    made = [0]
    for op in graph.ops[: len(boundaries)]:
        made.append(made[-1] + sum(size[s] for s in op.writes if s not in pinned))
    cuts = _narrow_places(graph, boundaries, widths)
    while cuts:
        ends = [0, *cuts, len(boundaries)]
        worth = [
            (made[place] - made[before]) * (made[after] - made[place]) / max(1, widths[place]) ** 2
            for before, place, after in zip(ends, cuts, ends[2:], strict=False)
        ]
        least = min(worth)
        if least >= 1 and len(cuts) < most:
            break
        cuts.pop(worth.index(least))
    return cuts


def _narrow_places(graph: StepGraph, boundaries: list[tuple[int, ...]], widths: list[int]) -> list[int]:
    """Local minima of the width; of neighbours of equal width, those with most boundary bytes read by backward."""
    read = {s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
    useful = [sum(graph.storages[s].nbytes for s in boundary if s in read) for boundary in boundaries]
    places = [p for p in range(1, len(boundaries)) if boundaries[p] and boundaries[p] != boundaries[p - 1]]
    minima = [
        place
        for i, place in enumerate(places)
        if (i == 0 or widths[place] <= widths[places[i - 1]])
        and (i + 1 == len(places) or widths[place] <= widths[places[i + 1]])
    ]
    neighbours = [{places[i + step] for step in (-1, 1) if 0 <= i + step < len(places)} for i in range(len(places))]
    beside = dict(zip(places, neighbours, strict=True))
    return [p for p in minima if all(useful[p] >= useful[q] for q in beside[p] if widths[q] == widths[p])]


def _counterparts(graph: StepGraph, pinned: frozenset[int], cuts: list[int]) -> list[int]:
    """For each cut, the first backward op that needs a storage made before the cut and not in its boundary."""
    reach: dict[int, int] = {}
    for index, op in enumerate(graph.ops[: graph.loss_index]):
        reach.update((s, index) for s in (*op.reads, *op.writes) if _planned(graph, s, pinned))
    positions = dict.fromkeys(cuts, len(graph.ops))
    waiting = sorted(cuts)
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.BACKWARD:
            continue
        needs = min((reach[s] for s in op.reads if s in reach), default=len(graph.ops))
        while waiting and waiting[-1] > needs:
            positions[waiting.pop()] = index
    positions[cuts[0]] = len(graph.ops)
    return [positions[cut] for cut in cuts]


def _planned(graph: StepGraph, storage: int, pinned: frozenset[int]) -> bool:
    return graph.storages[storage].kind is StorageKind.FORWARD and storage not in pinned
