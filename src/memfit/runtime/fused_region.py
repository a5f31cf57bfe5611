"""Turns a fused region, whose ops run slice by slice, into one call (`memfit.ir.fusion`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.joint import JointOp, JointReading
from memfit.fxir.layout import looks_alike, outer_axis
from memfit.ops.batching.sampling import Sampling, sampling_of
from memfit.ops.batching.slices import Slice, ViewOfSlice, accumulates, in_slices, view_of_samples
from memfit.ops.tiling.tile import Tiling
from memfit.ops.tiling.tiled import tiling_of
from memfit.ops.tiling.window import SPACE, Tile, narrowed, tiles_of
from memfit.passes.read_joint import result_index
from memfit.runtime.tile_schedule import TiledOp, schedule, within

__all__ = ["FusedCall", "FusedOp", "fused_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """One op of a fused region.

    Attributes:
        op: the op; it has `by_slices`.
        from_statistics: whether the call that replaces the op at recomputation runs.
        passed_on: storages among its results that nothing reads after the region, so that they exist as slices only.
        over: the storage whose memory its first result takes over, if any.
    """

    op: JointOp
    from_statistics: bool
    passed_on: tuple[int, ...]
    over: int | None

    @property
    def call(self) -> fx.Node | Call:
        """Call that runs for the op: `op.recompute_as` if present and the op runs from statistics, else `op.node`."""
        return self.op.recompute_as if self.from_statistics and self.op.recompute_as is not None else self.op.node

    @property
    def writes(self) -> tuple[int, ...]:
        """Storages of its results."""
        return self.op.writes[:1] if self.from_statistics else self.op.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """The call that runs a fused region.

    Attributes:
        target: the function to call; it returns a tuple.
        operands: nodes of the joint graph.
        results: storages, one for each item of the tuple.
        streams: by position of each operand that is a stream of slices (`memfit.runtime.offload.slice_stream`), the
            storage of the stream.
    """

    target: Callable[..., tuple[torch.Tensor, ...]]
    operands: tuple[fx.Node, ...]
    results: tuple[int, ...]
    streams: Mapping[int, int]


def fused_call(reading: JointReading, ops: Sequence[FusedOp], tier_resident: Collection[int] = ()) -> FusedCall:
    """Builds the call for consecutive ops.

    Args:
        reading: the subgraph.
        ops: the fused region.
        tier_resident: tier-resident storages.
    """
    slices = ops[0].op.by_slices
    assert slices is not None
    graph = fx.Graph()
    tilings = [_tiling(fused.call, len(slices.grid)) for fused in ops] if slices.grid else None
    tiles = _Tiles(graph) if slices.grid else None
    samplings = [] if slices.grid else [_sampling(fused.call, slices.batch) for fused in ops]
    made: dict[int, fx.Node] = {}
    totals: list[int] = []
    given_totals = graph.placeholder("totals") if any(accumulates(fused.call) for fused in ops) else None
    operands: dict[tuple[fx.Node, int | None], fx.Node] = {}
    streams: dict[int, int] = {}
    for number, fused in enumerate(ops):
        call = fused.call
        axes = samplings[number].operands if tilings is None else dict.fromkeys(tilings[number].operands, 0)

        def value(node: fx.Node, axes: Mapping[fx.Node, int] = axes) -> fx.Node:
            storage = reading.storage_of.get(node)
            if storage is not None and storage in tier_resident and storage not in made:
                base = reading.storages[storage].base
                made[storage] = graph.placeholder(f"operand_{len(operands)}")
                streams[len(operands)] = storage
                operands[base, None] = made[storage]
            if storage in made:
                base = reading.storages[storage].base
                return _viewed(graph, made[storage], base, node, slices.batch, axes[node])
            key = node, axes.get(node)
            if key not in operands:
                operands[key] = graph.placeholder(f"operand_{len(operands)}")
            return operands[key]

        if tilings is None or tiles is None:
            arguments, named = fx.map_arg(call.args, value), fx.map_arg(call.kwargs, value)
            if accumulates(call):
                named = {**named, "total": graph.call_function(operator.getitem, (given_totals, len(totals)))}
                totals.append(fused.writes[0])
            result = graph.call_function(samplings[number].run, arguments, named)
        else:
            result = tiles.call(call, tilings[number], value)
        alone = isinstance(call.meta["val"], torch.Tensor)
        for storage in fused.writes:
            index = result_index(reading.storages[storage].base)
            if alone or index >= 0:
                made[storage] = result if alone else graph.call_function(operator.getitem, (result, index))
    position = {reading.storage_of.get(node): i for i, (node, axis) in enumerate(operands) if axis is not None}
    over: dict[int, int] = {}
    for fused in ops:
        if fused.over is not None and fused.over not in position:  # no op reads it, only its memory is reused
            position[fused.over] = len(operands)
            base = reading.storages[fused.over].base
            operands[base, None] = graph.placeholder(f"operand_{len(operands)}")
        if fused.over is not None:
            over[fused.writes[0]] = position[fused.over]
    passed_on = {s for fused in ops for s in fused.passed_on}
    sums = {s for fused in ops if fused.op.by_slices is not None for s in fused.op.by_slices.sums}
    written = {s for fused in ops for s in fused.writes}
    results = tuple(s for s in made if s in written and s not in passed_on)
    into: dict[int, int] = {}
    taken = set(streams)
    for place, storage in enumerate(results):
        if storage in tier_resident:
            into[place] = len(operands)
            streams[len(operands)] = storage
            operands[reading.storages[storage].base, None] = graph.placeholder(f"operand_{len(operands)}")
    values = [reading.storages[s].base.meta["val"] for s in results]
    tile_runs: list[tuple[list[Tile], list[Tile]]] = []
    if tilings is not None and tiles is not None:
        graph.output(tuple(made[s] if s in sums else tiles.take(made[s]) for s in results))
        stays = {
            s: tuple(value.shape[SPACE : SPACE + len(slices.grid)])
            for s, value in zip(results, values, strict=True)
            if s not in sums
        }
        tile_runs = _tile_runs(reading, ops, tilings, results, stays, slices.grid)
    else:
        graph.output(tuple(made[s] for s in results))
    target = in_slices(
        Slice(
            run=fx.GraphModule(torch.nn.Module(), graph).forward,
            sliced={i: axis for i, (_, axis) in enumerate(operands) if axis is not None},
            batch=slices.batch,
            samples=slices.samples,
            results=values,
            axes=[
                0 if slices.grid or s in sums else _outer_axis(v, slices.batch)
                for s, v in zip(results, values, strict=True)
            ],
            over=[over.get(s) for s in results],
            sums={place for place, s in enumerate(results) if s in sums},
            totals=[results.index(s) for s in totals],
            tile_runs=tile_runs,
            streams=taken,
            into=into,
        )
    )
    return FusedCall(
        target=target,
        operands=tuple(node for node, _ in operands),
        results=tuple(s for s in results if s not in tier_resident),
        streams=streams,
    )


class _Tiles:
    """Emits calls that run on a tile; all tiles to compute and to read come in one list, in the order of their use."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.given = graph.placeholder("tiles")
        self.count = 0

    def call(self, call: fx.Node | Call, tiling: Tiling, value: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Emits a call on a tile: its own tile comes first in the list, then the tiles of its operands."""
        made = self._next()
        taken = {node: self.take(value(node)) for node in tiling.operands}
        arguments = fx.map_arg(call.args, lambda node: taken[node] if node in taken else value(node))
        return self.graph.call_function(tiling.run, arguments, {"tile": made})

    def take(self, tensor: fx.Node) -> fx.Node:
        """The next tile of a tensor."""
        return self.graph.call_function(narrowed, (tensor, self._next()))

    def _next(self) -> fx.Node:
        self.count += 1
        return self.graph.call_function(operator.getitem, (self.given, self.count - 1))


def _viewed(graph: fx.Graph, made: fx.Node, base: fx.Node, node: fx.Node, batch: int, axis: int) -> fx.Node:
    """View of a node on the computed samples of its base; the samples themselves if both have the same layout."""
    whole, value = base.meta["val"], node.meta["val"]
    if looks_alike(value, whole):
        return made
    view = ViewOfSlice.of(whole, value, batch, axis)
    assert view is not None, f"{node.name} does not have samples where {base.name} has them"
    return graph.call_function(view_of_samples(view, batch), (made,))


def _outer_axis(value: torch.Tensor, batch: int) -> int:
    axis = outer_axis(value, batch)
    assert axis is not None
    return axis


def _sampling(call: fx.Node | Call, batch: int) -> Sampling:
    sampling = sampling_of(call, batch)
    assert sampling is not None, f"{call.name} does not run on samples"
    return sampling


def _tiling(call: fx.Node | Call, axes: int) -> Tiling:
    tiling = tiling_of(call, axes)
    assert tiling is not None, f"{call.name} does not run in tiles"
    return tiling


def _tile_runs(
    reading: JointReading,
    ops: Sequence[FusedOp],
    tilings: Sequence[Tiling],
    results: Sequence[int],
    stays: Mapping[int, Sequence[int]],
    grid: Sequence[int],
) -> list[tuple[list[Tile], list[Tile]]]:
    """For each tile of the run, the tiles in the order in which `_Tiles` reads them, and the tiles of its results."""
    tiled = [
        TiledOp(
            call=fused.call,
            tiling=tiling,
            operands=tuple(reading.storage_of[node] for node in tiling.operands),
            results={s: result_index(reading.storages[s].base) for s in fused.writes},
        )
        for fused, tiling in zip(ops, tilings, strict=True)
    ]
    own = {storage: tiles_of(extents, grid) for storage, extents in stays.items()}
    found: list[tuple[list[Tile], list[Tile]]] = []
    for number, op_tiles in enumerate(schedule(tiled, stays, grid)):
        there = {s: op_tile.made for op, op_tile in zip(tiled, op_tiles, strict=True) for s in op.results}
        given = [tile for op_tile in op_tiles for tile in (op_tile.made, *op_tile.taken)]
        given += [within(own[s][number], there[s]) for s in results if s in own]
        found.append((given, [own[s][number] if s in own else () for s in results]))
    return found
