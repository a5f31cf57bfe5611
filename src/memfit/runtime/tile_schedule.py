"""Schedule of a fused region, tile after tile: the tile that each op computes for each tile of the run.

The results that stay after the run are cut into disjoint tiles. From these, the tile of each op is found backwards: the
part that later ops need (`memfit.ops.tiling.tiled`). Sums are computed for the op's own tile only, so that no element
counts twice.

Known limits: values that two tiles need are computed twice, not saved in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from memfit.fxir.call import Call
from memfit.ops.registry import sums_of
from memfit.ops.tiling.tile import Tiling
from memfit.ops.tiling.window import Tile, tiles_of

__all__ = ["OpTile", "TiledOp", "schedule", "within"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledOp:
    """One op of a run.

    Attributes:
        call: the call of the op.
        tiling: how the call runs on a tile.
        operands: storages of `tiling.operands`.
        results: storages of its results that are needed, with their place among its results.
    """

    call: fx.Node | Call
    tiling: Tiling
    operands: tuple[int, ...]
    results: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class OpTile:
    """Work of one op for one tile of a run.

    Attributes:
        made: the tile that it computes.
        taken: for each operand, the tile that it needs, counted within the part that is available: the whole operand,
            or the part computed for this tile of the run.
    """

    made: Tile
    taken: tuple[Tile, ...]


def schedule(ops: Sequence[TiledOp], stays: Mapping[int, Sequence[int]], grid: Sequence[int]) -> list[list[OpTile]]:
    """For each tile of the run, the work of each op.

    Args:
        ops: in their order.
        stays: extents of the results that stay after the run, by storage.
        grid: number of tiles along each axis.
    """
    own = {storage: tiles_of(extents, grid) for storage, extents in stays.items()}
    added_up = [tiles_of(op.tiling.extents, grid) for op in ops]
    count = len(added_up[0])
    return [_op_tiles(ops, {s: of[n] for s, of in own.items()}, [of[n] for of in added_up]) for n in range(count)]


def _op_tiles(ops: Sequence[TiledOp], wanted: dict[int, Tile], own: Sequence[Tile]) -> list[OpTile]:
    made: list[Tile] = []
    for op, alone in zip(reversed(ops), reversed(own), strict=True):
        here: Tile | None = None
        for storage, place in op.results.items():
            if storage in wanted and place not in sums_of(op.call):
                here = _hull(here, wanted[storage])
        made.append(here or alone)
        for storage, needed in zip(op.operands, op.tiling.needs(made[-1]), strict=True):
            wanted[storage] = _hull(wanted.get(storage), needed)
    there: dict[int, Tile] = {}
    found: list[OpTile] = []
    for op, here in zip(ops, reversed(made), strict=True):
        needs = zip(op.operands, op.tiling.needs(here), strict=True)
        found.append(OpTile(made=here, taken=tuple(within(tile, there.get(s)) for s, tile in needs)))
        there.update(dict.fromkeys(op.results, here))
    return found


def within(tile: Tile, there: Tile | None) -> Tile:
    """A tile, counted from the start of the available part `there`."""
    if there is None:
        return tile
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(tile, there, strict=True))


def _hull(one: Tile | None, other: Tile) -> Tile:
    if one is None:
        return other
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
