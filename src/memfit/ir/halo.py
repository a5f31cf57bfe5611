"""How much of its result an op makes at once in a run that goes tile by tile.

A convolution reads more than it makes, so in a fused region the earlier ops make more than their tile: they also make
the halo that later ops read beyond their own tile. Neighbouring tiles both make the halo between them. The run is
walked backwards, and each op adds its own reach (`memfit.ir.slicing.Reach`). Results that stay after the run, and sums,
are made once for each tile.

Receptive-field arithmetic, as in fused-layer accelerators (Alwani et al., MICRO 2016) and SFT (Xu et al., CC 2022).

Known limits: tiles are assumed to be equally large, so a slice may have a row or two less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from memfit.ir.graph import Op

__all__ = ["Spread", "spreads"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Amount that an op makes in a fused region, at once and in all, relative to its whole result.

    Attributes:
        share: the largest part of its samples that it makes at once; 1.0 if samples are not cut in space.
        work: all that it makes, relative to its result: parts that are made twice count twice.
    """

    share: float = 1.0
    work: float = 1.0


_WHOLE = Spread()


def spreads(ops: Sequence[Op]) -> list[Spread]:
    """For each op of a run the amount that it makes.

    Args:
        ops: as they run; all are cut alike.
    """
    if ops[0].by_slices is None or not ops[0].by_slices.grid:
        return [_WHOLE] * len(ops)
    found = [_along(ops, axis) for axis in range(len(ops[0].by_slices.grid))]
    return [
        Spread(share=math.prod(s.share for s in of_op), work=math.prod(s.work for s in of_op))
        for of_op in zip(*found, strict=True)
    ]


@lru_cache(maxsize=1 << 14)
def _spread(extent: int, tiles: int, above: float, below: float) -> Spread:
    """The spread of tiles that reach `above` and `below` beyond themselves, but not beyond the border."""
    made = [
        min(extent, (tile + 1) * extent / tiles + below) - max(0.0, tile * extent / tiles - above)
        for tile in range(tiles)
    ]
    # Where tiles cannot be equal, some tiles are one row larger than others.
    most = min(extent, max(made) + (extent % tiles > 0))
    return Spread(share=most / extent, work=sum(made) / extent)


def _along(ops: Sequence[Op], axis: int) -> list[Spread]:
    """The spreads of ops along one axis."""
    wanted: dict[int, tuple[float, float]] = {}  # by storage, how far later ops read before and after their tile
    found: list[Spread] = []
    for op in reversed(ops):
        slices = op.by_slices
        assert slices is not None
        tiles, extent = slices.grid[axis], slices.extents[axis]
        above = below = 0.0
        for storage in op.writes:
            if storage in wanted and storage not in slices.sums:
                above, below = max(above, wanted[storage][0]), max(below, wanted[storage][1])
        found.append(_spread(extent, tiles, above, below))
        for storage, reaches in zip(slices.reads, slices.reaches, strict=True):
            reach = reaches[axis]
            before, after = wanted.get(storage, (0.0, 0.0))
            wanted[storage] = (
                max(before, above * reach.scale + reach.before),
                max(after, below * reach.scale + reach.after),
            )
    return found[::-1]
