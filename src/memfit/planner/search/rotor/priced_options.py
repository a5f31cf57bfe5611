"""Memory and time of each option to run a stretch of the chain, in the bytes and seconds of the step it is part of.

A `Shape` does not know its place in the step. Here its options are combined with the rest of the step: the memory in
use at that place in every plan (outputs, gradients, small results), and whether the stretch runs for the first time or
is recomputed. A recomputation leaves out ops whose results are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from memfit.ir.graph import StepGraph, StorageKind
from memfit.ir.instructions import Compute, Free
from memfit.ir.program import baseline_order, program_of
from memfit.planner.analysis.chain import Chain
from memfit.planner.effort import Effort
from memfit.planner.search.rotor.options import options_of
from memfit.planner.search.rotor.shape import Shape, cone, profile, shape_of

__all__ = ["Pass", "Site", "PricedOption", "site_of"]

_OPTION_WORK, _SAVED_WORK = 1.5, 1.0
"""Work to price an option, and to choose a set of saved storages, in simulations of the stretch."""

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of blocks that a stretch may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOption:
    """An option of blocks `start` to `stop` with one of its backward passes. Static bytes are not included.

    Attributes:
        start: first block.
        stop: block after the last.
        saved_bytes: bytes held from its forward to its backward pass.
        forward: ops of its forward pass when it is recomputed.
        backward: ops of its backward pass.
        only: ops of both when the stretch is recomputed and its backward pass follows at once.
        first_need: peak of the first forward pass and the backward pass.
        down_need: peak of the backward pass.
        recompute_rise: peak of the forward pass when it is recomputed, on top of the memory in use then.
        only_rise: peak of `only`, on top of the memory in use then.
        first_seconds: time of forward ops, first forward pass and backward pass.
        recompute_seconds: the same when it is recomputed.
        only_seconds: time of forward ops in `only`.
    """

    start: int
    stop: int
    saved_bytes: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    only: tuple[int, ...]
    first_need: int
    down_need: int
    recompute_rise: int
    only_rise: int
    first_seconds: float
    recompute_seconds: float
    only_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward pass through one block that saves only the boundary after it.

    Attributes:
        again: ops when it is recomputed.
        first_seconds: time when it runs first.
        recompute_seconds: time when it is recomputed.
        first_rise: peak when it runs first, by the block whose boundary is held.
        recompute_rise: peak when it is recomputed, by the block whose boundary is held.
    """

    again: tuple[int, ...]
    first_seconds: float
    recompute_seconds: float
    first_rise: tuple[int, ...]
    recompute_rise: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The chain with the memory and time of its options in the step.

    Attributes:
        chain: the blocks.
        options: the options by first block.
        passes: the forward passes by block.
        checkpoint_bytes: by held boundary, by block: bytes of the boundary before that block without storages of the
            held boundary.
        forward_base: by block, memory in use at the end of its first forward pass in every plan.
        backward_base: by block, memory in use when the backward pass of the block before it begins.
        effort_seconds: work of pricing, in nominal seconds.
    """

    chain: Chain
    options: tuple[tuple[PricedOption, ...], ...]
    passes: tuple[Pass, ...]
    checkpoint_bytes: tuple[tuple[int, ...], ...]
    forward_base: tuple[int, ...]
    backward_base: tuple[int, ...]
    effort_seconds: float = 0.0


def site_of(graph: StepGraph, chain: Chain, *, span: int, narrow: int, patience: int, seconds: float = inf) -> Site:
    """Prices every option of every stretch, short stretches first.

    Args:
        graph: the step.
        chain: its blocks.
        span: most forward ops of a stretch of several blocks.
        narrow: memory below which no narrower backward pass is searched for.
        patience: number of failed attempts at a narrower backward pass that ends the search.
        seconds: nominal seconds after which stretches of several blocks are left out.
    """
    effort, shapes_seen = Effort(), set[Shape]()
    lasts = _last_reads(graph)
    in_use = _in_use(graph, chain)
    blocks = chain.blocks
    forward_base = tuple(in_use[block.last + 1] for block in blocks)
    backward_base = (0, *(in_use[block.backward_first] for block in blocks))
    shapes = [shape_of(graph, chain, lasts, start, start + 1) for start in range(len(blocks))]
    options: list[list[PricedOption]] = [[] for _ in blocks]
    for start, stop in _stretches(graph, chain, span):
        if stop > start + 1 and effort.exceeds(seconds):
            break
        shape = shapes[start] if stop == start + 1 else shape_of(graph, chain, lasts, start, stop)
        priced = _priced_options(
            *(shape, chain, start, stop),
            *(max(forward_base[start:stop]), backward_base[stop]),
            *(narrow, patience),
        )
        options[start] += priced
        saved = len({option.forward for option in priced})
        # Options of the same shape are cached.
        runs = _SAVED_WORK * saved + _OPTION_WORK * len(priced) if shape not in shapes_seen else len(priced)
        effort.charge_ops(runs * len(shape.ops))
        shapes_seen.add(shape)
    return Site(
        chain=chain,
        options=tuple(map(tuple, options)),
        passes=tuple(_pass(graph, chain, shape, start) for start, shape in enumerate(shapes)),
        checkpoint_bytes=_checkpoint_bytes(graph, chain),
        forward_base=forward_base,
        backward_base=backward_base,
        effort_seconds=effort.seconds,
    )


def _stretches(graph: StepGraph, chain: Chain, span: int) -> Iterator[tuple[int, int]]:
    """First block of each stretch and the block after its last, short stretches first."""
    for width in _WIDTHS:
        for start in range(len(chain.blocks) - width + 1):
            if width == 1 or _weight(graph, chain, start, start + width) <= span:
                yield start, start + width


def _weight(graph: StepGraph, chain: Chain, start: int, stop: int) -> int:
    ops = graph.ops[chain.blocks[start].first : chain.blocks[stop - 1].last + 1]
    return sum(any(s not in chain.pinned for s in op.writes) for op in ops)


def _last_reads(graph: StepGraph) -> list[int]:
    lasts = [-1] * len(graph.storages)
    for index, op in enumerate(graph.ops):
        for s in op.reads:
            lasts[s] = index
    for s in graph.held_to_the_end():
        lasts[s] = len(graph.ops)
    return lasts


def _in_use(graph: StepGraph, chain: Chain) -> list[int]:
    """Before each op, the bytes in use in every plan, without static bytes."""
    counted = [
        s.nbytes if s.kind is not StorageKind.FORWARD or i in chain.pinned else 0 for i, s in enumerate(graph.storages)
    ]
    before: list[int] = []
    live = 0
    for instruction in program_of(graph, baseline_order(graph)).instructions:
        if isinstance(instruction, Free):
            live -= counted[instruction.storage]
        if not isinstance(instruction, Compute):
            continue
        before.append(live)
        op = graph.ops[instruction.op]
        live += sum(counted[s] for s in op.writes)
        if instruction.over is not None:
            live -= counted[instruction.over]
    return [*before, live]


def _priced_options(
    shape: Shape, chain: Chain, start: int, stop: int, forward_base: int, backward_base: int, narrow: int, patience: int
) -> list[PricedOption]:
    arriving = sum(shape.sizes[s] for s in shape.arriving)
    found: list[PricedOption] = []
    room = max(0, narrow - backward_base + arriving) // (narrow // 16 + 1) * (narrow // 16 + 1)
    for option in options_of(shape, room, patience):
        wanted = option.saved.union(shape.out)
        again = cone(shape, wanted, shape.given)
        first_rise = _peak(shape, range(shape.forward), wanted)
        for backward in option.backwards:
            only = (*cone(shape, option.saved, shape.given), *backward.sequence)
            down_need = backward_base - arriving + backward.peak
            found.append(
                PricedOption(
                    start=start,
                    stop=stop,
                    saved_bytes=sum(shape.sizes[s] for s in wanted),
                    forward=_placed(shape, chain, start, stop, again),
                    backward=_placed(shape, chain, start, stop, backward.sequence),
                    only=_placed(shape, chain, start, stop, only),
                    first_need=max(forward_base + first_rise, down_need),
                    down_need=down_need,
                    recompute_rise=_peak(shape, again, wanted),
                    only_rise=_peak(shape, only, shape.leaving) - arriving,
                    first_seconds=_seconds(shape, range(shape.forward)) + backward.seconds,
                    recompute_seconds=_seconds(shape, again) + backward.seconds,
                    only_seconds=_seconds(shape, only),
                )
            )
    return found


def _placed(shape: Shape, chain: Chain, start: int, stop: int, sequence: Sequence[int]) -> tuple[int, ...]:
    """Ops of a shape as ops of the step."""
    forward, backward = chain.blocks[start].first, chain.blocks[stop - 1].backward_first - shape.forward
    return tuple(i + (forward if i < shape.forward else backward) for i in sequence)


def _peak(shape: Shape, sequence: Sequence[int], wanted: frozenset[int] | tuple[int, ...]) -> int:
    return max(profile(shape, sequence, wanted)[0], default=0)


def _seconds(shape: Shape, sequence: Sequence[int]) -> float:
    return sum((shape.ops[i].seconds for i in sequence if i < shape.forward), 0.0)


def _pass(graph: StepGraph, chain: Chain, shape: Shape, index: int) -> Pass:
    again = cone(shape, shape.out, shape.given)
    boundary, after = chain.blocks[index].boundary, set(chain.boundary_after(index))
    wanted = (*shape.out, *(n for n, s in enumerate(boundary) if s in after))
    rises: dict[tuple[int, ...], tuple[int, int]] = {}

    def rise(held: tuple[int, ...]) -> tuple[int, int]:
        sizes = tuple(0 if s in held else graph.storages[s].nbytes for s in boundary)
        if sizes not in rises:
            counted = replace(shape, sizes=sizes + shape.sizes[len(sizes) :])
            first, second = (_peak(counted, ops, wanted) for ops in (range(shape.forward), again))
            rises[sizes] = max(first, sum(sizes)), max(second, sum(sizes))
        return rises[sizes]

    by_held = [rise(block.boundary) for block in chain.blocks[: index + 1]]
    return Pass(
        again=_placed(shape, chain, index, index + 1, again),
        first_seconds=_seconds(shape, range(shape.forward)),
        recompute_seconds=_seconds(shape, again),
        first_rise=tuple(first for first, _ in by_held),
        recompute_rise=tuple(second for _, second in by_held),
    )


def _checkpoint_bytes(graph: StepGraph, chain: Chain) -> tuple[tuple[int, ...], ...]:
    boundaries = [frozenset(block.boundary) for block in chain.blocks]
    return tuple(
        tuple(sum(graph.storages[s].nbytes for s in boundary - held) for boundary in boundaries) for held in boundaries
    )
