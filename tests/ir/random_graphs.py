"""Random steps and random orders of them, for property tests of everything that plans or judges."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.slicing import BySlices
from tests.residents import residents

__all__ = ["orders", "sliced_step_graphs", "sliced_steps_and_orders", "step_graphs"]

_SIZES = st.sampled_from([0, 1, 2, 3, 4, 4, 4, 8, 8, 100])
_SECONDS = st.integers(0, 16).map(lambda eighths: eighths / 8)  # sums of eighths are exact

# Strategies are made once: hypothesis checks and labels each new one, which takes longer than to draw from it.
_TARGETS = st.sampled_from(["aten.mm.default", "aten.relu.default"])
_MODULES = st.sampled_from(["", "layer1.0", "layer1.1"])
_WORKSPACES = st.sampled_from([0, 0, 5, 50])
_WRITTEN = st.lists(_SIZES, min_size=1, max_size=3)
_RANDOM_STATES = st.sampled_from([0, 0, 0, 16])
_SELDOM_NOT = st.sampled_from([True, True, True, False])
_MOST = st.sampled_from([True, True, True, True, False])
_EVEN = st.booleans()
_STATIC_BYTES = st.integers(0, 1000)
_AFTER_STEP = st.sampled_from([0, 0, 20, 2000])
_LABELS = st.sampled_from(["", "toy · 16×3"])
_SLICE_WORKSPACES = st.sampled_from([0, 0, 2])
_COPY_SHARES = st.sampled_from([0.0, 0.25, 1.0])
_EQUAL_SIZES = st.sampled_from([100, 100, 100, 40])


@lru_cache
def _whole(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


@lru_cache
def _places(count: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Distinct places of a list of `count`, none where it is empty."""
    return st.lists(_whole(0, count - 1), min_size=least, max_size=most, unique=True) if count else st.just([])


@lru_cache
def _subgraphs(most_subgraphs: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(_whole(0, most_subgraphs - 1), min_size=least, max_size=most).map(sorted)


@st.composite
def step_graphs(
    draw: st.DrawFn, *, min_forward: int = 1, max_forward: int = 6, max_subgraphs: int = 2, exact: bool = False
) -> StepGraph:
    """A step as a capture would give it: a forward pass, the loss, and the mirrored backward pass.

    Args:
        draw: given by hypothesis.
        min_forward: fewest forward ops.
        max_forward: most forward ops.
        max_subgraphs: most subgraphs between graph breaks; what crosses from one to another is made once, as in a
            capture.
        exact: whether every forward op may be recomputed.
    """
    storages: list[Storage] = []
    ops: list[Op] = []

    def storage(kind: StorageKind, nbytes: int) -> int:
        storages.append(Storage(name=f"s{len(storages)}", nbytes=nbytes, kind=kind))
        return len(storages) - 1

    def op(phase: Phase, subgraph: int, reads: list[int], writes: list[int], **facts: object) -> None:
        sizes = [storages[s].nbytes for s in writes[:1]]
        places = [s for s in reads if [storages[s].nbytes] == sizes and storages[s].kind is not StorageKind.STATIC]
        made = Op(
            name=f"{phase}{len(ops)}",
            target=draw(_TARGETS),
            module=draw(_MODULES),
            phase=phase,
            subgraph=subgraph,
            reads=tuple(reads),
            writes=tuple(writes),
            in_place_over=tuple(some(places, 0, 2)),
            seconds=draw(_SECONDS),
            workspace_bytes=draw(_WORKSPACES),
            **facts,
        )
        ops.append(replace(made, recompute_as=later(made)) if facts.get("recomputable") else made)

    def later(made: Op) -> Op | None:
        """Another call for all but the first time, from results that last, as batch normalisation has."""
        if len(made.writes) < 2 or made.random_state_bytes or not draw(_EVEN):
            return None
        return replace(
            made,
            target="normalise",
            reads=(*made.reads[:1], *made.writes[1:]),
            writes=made.writes[:1],
            in_place_over=tuple(s for s in made.in_place_over if s in made.reads[:1]),
            seconds=made.seconds / 2,
            workspace_bytes=0,
        )

    def some(of: list[int], least: int, most: int) -> list[int]:
        return [of[place] for place in draw(_places(len(of), least, most))]

    static = [storage(StorageKind.STATIC, draw(_SIZES)) for _ in range(draw(_whole(1, 3)))]
    trained = {s for s in static if draw(_EVEN)}
    values: list[int] = []
    subgraphs = draw(_subgraphs(max_subgraphs, min_forward, max_forward))
    for subgraph in subgraphs:
        reads = some(values[-3:], 0, 2) + some(static, 0 if values else 1, 1)
        sizes = draw(_WRITTEN)
        if reads and draw(_EVEN):
            sizes[0] = storages[reads[0]].nbytes  # as pointwise ops do
        writes = [storage(StorageKind.FORWARD, nbytes) for nbytes in sizes]
        op(
            Phase.FORWARD,
            subgraph,
            reads,
            writes,
            random_state_bytes=draw(_RANDOM_STATES),
            recomputable=exact or draw(_SELDOM_NOT),
        )
        values += writes
    subgraph_of = {s: made.subgraph for made in ops for s in made.writes}
    crossing = {s for made in ops for s in made.reads if subgraph_of.get(s, made.subgraph) != made.subgraph}
    ops[:] = [
        made if crossing.isdisjoint(made.writes) else replace(made, recomputable=False, recompute_as=None)
        for made in ops
    ]
    forward = list(ops)

    outputs = sorted({values[-1], *some(values, 0, 2)})
    gradients = {s: [storage(StorageKind.TANGENT, storages[s].nbytes)] for s in outputs}
    op(Phase.LOSS, 0, outputs, [tangent for tangents in gradients.values() for tangent in tangents])

    for mirrored in reversed(forward):
        arriving = [gradient for s in mirrored.writes for gradient in gradients.get(s, [])]
        wanted = [s for s in mirrored.reads if s in trained or storages[s].kind is StorageKind.FORWARD]
        if not arriving or not wanted:
            continue
        kinds = [StorageKind.GRADIENT if s in trained else StorageKind.BACKWARD for s in wanted]
        writes = [storage(kind, storages[s].nbytes) for s, kind in zip(wanted, kinds, strict=True)]
        for s, gradient in zip(wanted, writes, strict=True):
            gradients.setdefault(s, []).append(gradient)
        reads = arriving + some([*mirrored.reads, *mirrored.writes], 0, 3)
        op(Phase.BACKWARD, mirrored.subgraph, reads, writes)

    return StepGraph(
        ops=tuple(ops),
        storages=tuple(storages),
        outputs=tuple(outputs),
        residents=residents(draw(_STATIC_BYTES)),
        after_step_bytes=draw(_AFTER_STEP),
        after_step_seconds=draw(_SECONDS),
        label=draw(_LABELS),
    )


@st.composite
def sliced_step_graphs(draw: st.DrawFn, *, may_tile: bool = True) -> StepGraph:
    """A step of which most forward ops can run again a few samples at a time, with results of few sizes.

    Tiled ones can do so the first time and in the backward pass as well, and some of their results are sums.
    """
    graph = draw(step_graphs(min_forward=4, max_forward=8, exact=True))
    batch = draw(_whole(2, 5))
    samples = draw(_whole(1, batch - 1))
    tiled = may_tile and draw(_EVEN)

    def sliced(op: Op, before: Op | None) -> Op:
        op = replace(op, in_place_over=(), workspace_bytes=0, random_state_bytes=0, recompute_as=None)
        if op.phase is not Phase.FORWARD and not (tiled and op.phase is Phase.BACKWARD):
            return op
        if op.phase is Phase.FORWARD and before is not None and draw(_MOST):
            op = replace(op, reads=tuple(dict.fromkeys((*op.reads, before.writes[0]))))
        reads = tuple(s for s in op.reads if draw(_MOST))
        slices = BySlices(
            batch=batch,
            samples=samples,
            seconds=draw(_SECONDS),
            workspace_bytes=draw(_SLICE_WORKSPACES),
            reads=reads,
            copy_seconds=(copy := draw(_SECONDS)),
            copy_over_seconds=copy * draw(_COPY_SHARES),
            sums=tuple(s for s in op.writes if tiled and draw(_EVEN)),
            first=tiled,
            accumulates=tiled and draw(_EVEN),
        )
        return replace(op, by_slices=slices) if draw(_MOST) else op

    ops = tuple(sliced(op, before) for op, before in zip(graph.ops, [None, *graph.ops], strict=False))
    subgraph = {s: op.subgraph for op in ops for s in op.writes}
    crossing = {s for op in ops for s in op.reads if subgraph.get(s) != op.subgraph}
    storages = tuple(
        replace(s, nbytes=draw(_EQUAL_SIZES), reusable=number not in crossing and draw(_MOST))
        if s.kind in (StorageKind.FORWARD, StorageKind.BACKWARD)
        else s
        for number, s in enumerate(graph.storages)
    )
    return replace(graph, ops=ops, storages=storages)


@st.composite
def orders(draw: st.DrawFn, graph: StepGraph, *, max_again: int = 8) -> list[int]:
    """A valid order of a step: everything as captured, and forward ops again at places where that is allowed.

    Whatever is read was written before, because every op stands after the first run of those it depends on;
    so any insertion is right that repeats only recomputable ops, after their first run, and after the loss only those
    of the subgraph whose backward pass is running, or about to.
    """
    order = list(range(len(graph.ops)))
    for _ in range(draw(_whole(0, max_again))):
        place = draw(_whole(1, len(order)))
        backward = [graph.ops[i] for i in order[:place] if graph.ops[i].phase is Phase.BACKWARD]
        subgraph_reached = backward[-1].subgraph if backward else max(op.subgraph for op in graph.ops)
        coming = [graph.ops[i].subgraph for i in order[place:] if graph.ops[i].phase is Phase.BACKWARD]
        is_past_loss = graph.loss_index in order[:place]
        subgraph_coming = max(coming, default=0) if is_past_loss else 0
        candidates = [
            i
            for i in dict.fromkeys(order[:place])
            if graph.ops[i].phase is Phase.FORWARD
            and graph.ops[i].recomputable
            and subgraph_coming <= graph.ops[i].subgraph <= subgraph_reached
        ]
        if candidates:
            order.insert(place, candidates[draw(_whole(0, len(candidates) - 1))])
    return order


@st.composite
def sliced_steps_and_orders(draw: st.DrawFn) -> tuple[StepGraph, list[int]]:
    """Such a step and an order in which forward ops run again one after the other, as planners have them do."""
    graph = draw(sliced_step_graphs())
    order = draw(orders(graph, max_again=2))
    forward = [i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
    first = draw(_whole(0, len(forward) // 2))
    last = draw(_whole(len(forward) // 2, len(forward)))
    place = order.index(graph.loss_index) + 1
    backward = [op.subgraph for op in graph.ops if op.phase is Phase.BACKWARD]
    again = (i for i in forward[first:last] if graph.ops[i].recomputable)
    order[place:place] = [i for i in again if graph.ops[i].subgraph >= max(backward, default=0)]
    return graph, order
