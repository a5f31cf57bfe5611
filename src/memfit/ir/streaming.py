"""Tier-resident storages: ops write them to a tier slice by slice, and read slices of them back.

An op that runs slice by slice (`memfit.ir.fusion`) needs only one slice at a time of most operands, and of its results.
If this holds for every op that writes or reads a storage, the storage need not be in memory at all: each slice is
swapped out when it is made, and swapped in when it is read, one slice ahead of compute. So gradients that wait for each
other whole, and that no recomputation can free, take the memory of a few slices. This is swapping at the grain of a
slice; as in out-of-core algorithms, only the slices that compute works on are in memory.

A program names such storages before any op runs (`memfit.ir.instructions.TierResident`). It is then a program of a
changed step, in which these storages have no size and ops that touch them run in slices only (`streaming_step`).
Planners work on that step as on any other, and the simulator turns a program that streams into a program of that step.

Known limits: slices are cut along samples; a tile in space is cut out of the slice of its samples, which comes whole.
Every copy of a storage lives on its tier until the step ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec import structs

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind, Stream
from memfit.ir.residents import ResidentKind
from memfit.ir.tiers import Tier, TierLinks, slot_bytes

__all__ = [
    "bytes_in_flight",
    "slices_moving",
    "streamable",
    "streaming_step",
    "streams",
    "tier_bytes",
    "waited_seconds",
]

_IN_FLIGHT_INTO = 2
"""Slices of a storage in memory while it is read: the slice that compute reads and the next one."""

_IN_FLIGHT_OUT = 1
"""Slices of a storage in memory while it is written, in addition to the slice that is being made."""


def streamable(graph: StepGraph, *, least_bytes: int | None = None) -> list[int]:
    """The storages that every writer and reader touches slice by slice, all by the same slices.

    Args:
        graph: a tiled step.
        least_bytes: smaller storages are left out; None for the size from which the tiers of the step move slices.
    """
    of_tiers = min((links.sizes.least_tier_resident_bytes for links in graph.tiers), default=0)
    least = of_tiers if least_bytes is None else least_bytes
    large = (s for s, storage in enumerate(graph.storages) if storage.whole_bytes >= least)
    users = _users(graph)
    held = graph.held_to_the_end()
    return [s for s in large if s not in held and _moves_in_slices(graph.storages[s], s, users[s], held)]


def streaming_step(graph: StepGraph, placed: Mapping[int, Tier]) -> StepGraph:
    """The step in which some storages live on tiers: they have no size, and ops that touch them run in slices.

    Args:
        graph: the step, with the tiers.
        placed: these storages (see `streamable`), and the tier of each.

    Returns:
        A step of the same ops and storages, without tiers.
    """
    links = {links.tier: links for links in graph.tiers}

    def moved(index: int, storage: Storage) -> Storage:
        if index not in placed:
            return storage
        return structs.replace(
            storage,
            nbytes=0,
            reusable=False,
            stream=_stream(storage.nbytes, links.get(placed[index])),
        )

    storages = tuple(moved(index, storage) for index, storage in enumerate(graph.storages))
    changed = structs.replace(
        graph,
        baseline=graph.as_baseline(),
        storages=storages,
        tiers=(),
    ).beside("transfers", graph.buffer_bytes(set(placed.values())), ResidentKind.TRANSFER_BUFFER)
    held = graph.held_to_the_end()
    return structs.replace(changed, ops=tuple(_in_slices_only(changed, op, held) for op in graph.ops))


def streams(graph: StepGraph, op: Op) -> bool:
    """Whether an op touches a storage that lives on a tier, and so runs in slices only."""
    return any(graph.storages[s].stream is not None for s in (*op.reads, *op.writes))


def slices_moving(graph: StepGraph, ops: Sequence[Op], passed_on: Collection[int]) -> tuple[list[int], list[int]]:
    """The storages that a fused region reads from tiers, and the storages that it writes to tiers.

    Args:
        graph: a streaming step.
        ops: as they run.
        passed_on: results that nothing reads after the region.
    """
    written = {s for op in ops for s in op.writes}
    read = dict.fromkeys(s for op in ops for s in op.reads if s not in written)
    into = [s for s in read if graph.storages[s].stream is not None]
    out = [s for op in ops for s in op.writes if s not in passed_on and graph.storages[s].stream is not None]
    return into, out


def waited_seconds(graph: StepGraph, into: Sequence[int], out: Sequence[int], seconds: float) -> tuple[float, float]:
    """Seconds of compute that moving slices takes, and seconds that compute waits for links, in a fused region.

    Args:
        graph: a streaming step.
        into: see `slices_moving`.
        out: see `slices_moving`.
        seconds: time of the ops.
    """
    coming = [stream for s in into if (stream := graph.storages[s].stream) is not None]
    leaving = [stream for s in out if (stream := graph.storages[s].stream) is not None]
    taken = sum(s.into_compute_seconds for s in coming) + sum(s.out_compute_seconds for s in leaving)
    busy = max(sum(s.into_seconds for s in coming), sum(s.out_seconds for s in leaving))
    return taken, max(0.0, busy - seconds - taken)


def bytes_in_flight(graph: StepGraph, ops: Sequence[Op], passed_on: Collection[int]) -> int:
    """Bytes of the slices in flight in a fused region."""
    into, out = slices_moving(graph, ops, passed_on)
    slices = ops[0].by_slices
    if slices is None or not (into or out):
        return 0
    counted = [(s, _IN_FLIGHT_INTO) for s in into] + [(s, _IN_FLIGHT_OUT) for s in out]
    return sum(n * -(-graph.storages[s].whole_bytes * slices.samples // slices.batch) for s, n in counted)


def tier_bytes(graph: StepGraph, storage: int) -> int:
    """Bytes that a storage takes on its tier, where each slice of samples begins on a page of its own."""
    writer = next(op for op in graph.ops if storage in op.writes)
    assert writer.by_slices is not None
    batch, samples = writer.by_slices.batch, writer.by_slices.samples
    of_slice = -(-graph.storages[storage].whole_bytes * samples // batch)
    return -(-batch // samples) * slot_bytes(of_slice)


def _users(graph: StepGraph) -> list[list[tuple[Op, bool]]]:
    """For each storage the ops that touch it, in the form of their first run (False) and of recomputation (True)."""
    found: list[list[tuple[Op, bool]]] = [[] for _ in graph.storages]
    for op in graph.ops:
        for run, again in ((op, False), (op.later, True)):
            for storage in {*run.reads, *run.writes}:
                found[storage].append((run, again))
    return found


def _moves_in_slices(storage: Storage, number: int, users: Sequence[tuple[Op, bool]], held: Collection[int]) -> bool:
    if storage.kind not in (StorageKind.FORWARD, StorageKind.BACKWARD) or not users:
        return False
    # Storages that the caller holds are written once, and an op that runs slice by slice cannot drop one of its
    # results.
    if any(_writes_some(op, held) for op, _ in users):
        return False
    cuts = {(op.by_slices and op.by_slices.cut, op.subgraph) for op, _ in users}
    return len(cuts) == 1 and all(_touches_slices(number, op, again=again) for op, again in users)


def _writes_some(op: Op, held: Collection[int]) -> bool:
    """Whether recomputing an op would write both storages that the caller holds and others."""
    ours = [s for s in op.writes if s in held]
    return op.phase is Phase.FORWARD and op.recomputable and 0 < len(ours) < len(op.writes)


def _touches_slices(storage: int, op: Op, *, again: bool) -> bool:
    slices = op.by_slices
    if slices is None or op.phase is Phase.LOSS or slices.batch <= slices.samples or not (slices.first or again):
        return False
    return storage in slices.reads if storage in op.reads else storage not in slices.sums


def _stream(nbytes: int, links: TierLinks | None) -> Stream:
    if links is None:
        return Stream(nbytes=nbytes, out_seconds=0.0, into_seconds=0.0)
    return Stream(
        nbytes=nbytes,
        out_seconds=links.out.seconds(nbytes),
        into_seconds=links.into.seconds(nbytes),
        out_compute_seconds=nbytes * links.out.compute_seconds_per_byte,
        into_compute_seconds=nbytes * links.into.compute_seconds_per_byte,
    )


def _in_slices_only(graph: StepGraph, op: Op, held: AbstractSet[int]) -> Op:
    """An op of a streaming step: it runs in slices, with their costs, if it touches a tier-resident storage."""
    again = None if op.recompute_as is None else _in_slices_only(graph, op.recompute_as, held)
    if not streams(graph, op):
        return structs.replace(op, recompute_as=again)
    slices = op.by_slices
    if slices is None:  # its first run is whole, so its results do not live on a tier
        return structs.replace(op, recompute_as=again)
    into, out = slices_moving(graph, [op], ())
    taken, waited = waited_seconds(graph, into, out, slices.seconds)
    made = sum(slices.slice_bytes(s, graph.storages[s].whole_bytes) for s in op.writes)
    return structs.replace(
        op,
        recompute_as=again,
        recomputable=op.recomputable and held.isdisjoint(op.writes),
        in_place_over=(),
        in_place_seconds=None,
        variants=(),
        chunks=slices.slices,
        seconds=slices.seconds + slices.copy_over_seconds + taken + waited,
        workspace_bytes=made + slices.workspace_bytes + bytes_in_flight(graph, [op], ()),
    )
