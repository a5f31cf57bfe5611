"""Random steps with programs that swap, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.program import Program, program_of
from memfit.ir.tiers import Link, Tier, TierLinks
from memfit.planner.offload.model import swapping_step
from memfit.planner.offload.transfer_schedule import ahead_of_use, with_transfers
from memfit.sim.simulator import simulate
from tests.ir.random_graphs import orders, sliced_step_graphs, step_graphs

__all__ = ["links", "steps_with_swaps"]

_RATES = st.sampled_from([1.0, 3.0, 50.0, 1e6])


@st.composite
def links(draw: st.DrawFn) -> Link:
    """A link of any speed."""
    return Link(
        bytes_per_second=draw(_RATES),
        latency_seconds=draw(st.sampled_from([0.0, 0.0, 0.5])),
        compute_seconds_per_byte=draw(st.sampled_from([0.0, 0.0, 0.01])),
    )


@st.composite
def steps_with_swaps(draw: st.DrawFn) -> tuple[StepGraph, Program]:
    """A step and a program that swaps some of its results, brought back early or late, within its own peak or more."""
    graph = draw(step_graphs() | sliced_step_graphs(may_tile=False))  # a tiled step does not swap
    held = graph.held_to_the_end()
    subgraph = {s: op.subgraph for op in graph.ops for s in op.writes}
    crossing = {s for op in graph.ops for s in op.reads if subgraph.get(s, op.subgraph) != op.subgraph}  # which stays
    forward = [
        s
        for op in graph.ops
        if op.phase is Phase.FORWARD
        for s in op.writes
        if graph.storages[s].kind is StorageKind.FORWARD and s not in held and s not in crossing
    ]
    swapped = set(draw(st.lists(st.sampled_from(forward), unique=True))) if forward else set()
    tiers = {s: draw(st.sampled_from(list(Tier))) for s in sorted(swapped)}
    graph = replace(
        graph, tiers=tuple(TierLinks(tier=tier, out=draw(links()), into=draw(links()), buffer_bytes=7) for tier in Tier)
    )
    swapping = swapping_step(graph, tiers)
    order = draw(orders(swapping))
    peak = simulate(swapping, program_of(swapping, order)).peak_bytes
    limit = peak + draw(st.sampled_from([0, 3, 20, 10_000]))
    into = {s: next(t.into for t in graph.tiers if t.tier is tier) for s, tier in tiers.items()}
    early = ahead_of_use(swapping, order, into, limit)
    found = with_transfers(graph, swapping, program_of(swapping, early), tiers, limit)
    assert simulate(graph, found).peak_bytes <= limit
    return graph, found
