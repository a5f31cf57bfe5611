"""Swaps in orders: an op whose result is swapped is recomputed by swapping the result in.

Orders say which ops are recomputed, and every search for orders knows `Op.recompute_as`, another call that runs in
place of the op after the first time. Swapping has the same form: the recomputation reads nothing and writes the result,
at the cost of a transfer. So one search decides both: which of the results that may be swapped are saved, and which of
the other results are saved or recomputed. `memfit.planner.offload.transfer_schedule` then turns runs that stand for
transfers into transfers.

Known limits: a result that may be swapped is not recomputed by running its op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import structs

from memfit.ir.graph import Op, Phase, StepGraph, StorageKind
from memfit.ir.program import program_of
from memfit.ir.residents import ResidentKind
from memfit.ir.streaming import tier_bytes
from memfit.ir.tiers import Tier, slot_bytes
from memfit.sim.simulator import simulate

__all__ = ["SWAP_IN", "bring_back", "has_room", "peak_bytes", "placed_on_tiers", "swappable", "swapping_step"]

SWAP_IN = "memfit.swap_in"
"""Target of ops that stand for a transfer back."""


_SHARE_WAITED = 0.1
"""The share of the time of a transfer back for which searches expect compute to wait: links are busy, and a second
transfer back of the same storage was not counted when storages were chosen."""


def swappable(graph: StepGraph) -> list[int]:
    """Forward results that may be swapped to a tier of the step and that the backward pass or a later op reads again.

    Storages that cross between subgraphs stay in memory, since plain code between subgraphs may hold them.
    """
    least_bytes = min((links.sizes.least_bytes for links in graph.tiers), default=0)
    held = graph.held_to_the_end()
    read = {s for op in graph.ops if op.phase is not Phase.LOSS for s in op.reads}
    subgraph = {s: op.subgraph for op in graph.ops for s in op.writes}
    crossing = {s for op in graph.ops for s in op.reads if subgraph.get(s, op.subgraph) != op.subgraph}
    if len(set(subgraph.values())) > 1:
        crossing |= {s for op in graph.ops if not op.recomputable for s in op.writes}
    held |= crossing | {s for op in graph.ops if op.is_hook for s in op.writes}
    return [
        s
        for s, storage in enumerate(graph.storages)
        if storage.kind is StorageKind.FORWARD and s not in held and s in read and storage.nbytes >= least_bytes
    ]


def swapping_step(graph: StepGraph, placed: Mapping[int, Tier]) -> StepGraph:
    """The step with transfers back in place of second runs, and with the memory that transfers take.

    Args:
        graph: the step, with tiers.
        placed: forward results that may be swapped, and the tier of each.

    Returns:
        A step of the same ops and storages without tiers, for planners only.
    """
    links = {links.tier: links for links in graph.tiers}
    taken = {t: x.out.compute_seconds_per_byte + x.into.compute_seconds_per_byte for t, x in links.items()}
    busy = {t: 1 / x.into.bytes_per_second for t, x in links.items()}
    seconds_per_byte = max((taken[t] + _SHARE_WAITED * busy[t] for t in placed.values()), default=0.0)

    def changed(op: Op) -> Op:
        if op.phase is not Phase.FORWARD:
            return op
        if any(s in placed for s in op.in_place_over):
            # A storage on its way out cannot be written over yet; a recomputation may do so, as it reads another copy.
            left = tuple(s for s in op.in_place_over if s not in placed)
            op = structs.replace(op, in_place_over=left, recompute_as=op.recompute_as or op)
        moved = tuple(s for s in op.writes if s in placed)
        if not moved:
            return op
        seconds = seconds_per_byte * sum(graph.storages[s].nbytes for s in moved)
        again = Op(
            name=op.name,
            target=SWAP_IN,
            module=op.module,
            phase=op.phase,
            subgraph=op.subgraph,
            reads=(),
            writes=moved,
            seconds=seconds,
        )
        return structs.replace(
            op, recompute_as=again, recomputable=True, random_state_bytes=0, by_slices=None, estimated_seconds=None
        )

    staged = graph.beside("transfers", graph.buffer_bytes(placed.values()), ResidentKind.TRANSFER_BUFFER)
    return structs.replace(staged, ops=tuple(map(changed, graph.ops)), tiers=())


def peak_bytes(graph: StepGraph, order: Sequence[int], placed: Mapping[int, Tier]) -> int:
    """Peak of an order in which second runs of ops with results in `placed` stand for transfers back."""
    swapping = swapping_step(graph, placed)
    return simulate(swapping, program_of(swapping, order)).peak_bytes


def bring_back(graph: StepGraph, order: Sequence[int], swapped: Collection[int], *, ahead: int = 0) -> list[int]:
    """An order in which swapped storages come back before they are first read after the loss.

    Args:
        graph: the step.
        order: an order in which they are not recomputed after the loss.
        swapped: the swapped forward results.
        ahead: number of ops between the start of a transfer back and the first read.

    Returns:
        The order with second runs of their producers, which stand for transfers in the step of `swapping_step`.
    """
    producer = graph.producers()
    loss = order.index(graph.loss_index)
    back: dict[int, list[int]] = {}
    seen: set[int] = set()
    for place in range(loss + 1, len(order)):
        for storage in graph.ops[order[place]].reads:
            maker = producer[storage]
            if storage in swapped and maker not in seen:
                seen.add(maker)
                back.setdefault(max(loss + 1, place - ahead), []).append(maker)
    return [index for place, there in enumerate(order) for index in (*back.get(place, ()), there)]


def placed_on_tiers(graph: StepGraph, storages: Iterable[int], *, in_slices: bool = False) -> dict[int, Tier]:
    """A tier for each storage, the first one that has room; storages for which no tier has room are left out.

    Args:
        graph: the step, with tiers.
        storages: the storages to place, the most wanted first.
        in_slices: whether they move slice by slice.
    """
    room = {links.tier: links.limit_bytes for links in graph.tiers}
    sizes = {links.tier: links.sizes for links in graph.tiers}
    least = {t: s.least_tier_resident_bytes if in_slices else s.least_bytes for t, s in sizes.items()}
    found: dict[int, Tier] = {}
    for storage in storages:
        whole = graph.storages[storage].whole_bytes
        nbytes = tier_bytes(graph, storage) if in_slices else slot_bytes(whole)
        for tier, left in room.items():
            if whole >= least[tier] and (left is None or left >= nbytes):
                found[storage] = tier
                room[tier] = None if left is None else left - nbytes
                break
    return found


def has_room(graph: StepGraph, placed: Mapping[int, Tier]) -> bool:
    """Whether the tiers of a step have room for the storages placed on them."""
    for links in graph.tiers:
        held = sum(slot_bytes(graph.storages[s].nbytes) for s, tier in placed.items() if tier is links.tier)
        if links.limit_bytes is not None and held > links.limit_bytes:
            return False
    return True
