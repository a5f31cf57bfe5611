"""How much of what it makes an op has at once in a run that goes band by band.

A convolution reads more rows than it makes, so of ops that run as one the earlier ones make more than their band: the
halo that the later ones read beyond theirs. Neighbouring bands make it twice. Walked back through the run, each op adds
its own reach (`memfit.step.graph.Reach`). What stays after the run, and what is added up, is made for each band once.

Receptive-field arithmetic, as in fused-layer accelerators (Alwani et al., MICRO 2016) and SFT (Xu et al., CC 2022).

Known limits: rows are counted as fractions of bands of equal height, so a slice may have a row or two less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.step.graph import Op

__all__ = ["Spread", "spreads"]


@dataclass(frozen=True, slots=True)
class Spread:
    """What a run makes an op do.

    Attributes:
        share: the most it makes at once, as a share of its rows; 1.0 if it has no bands.
        work: what it makes in all, rows made twice counted twice, over its rows.
    """

    share: float = 1.0
    work: float = 1.0


_WHOLE = Spread()


def spreads(ops: Sequence[Op]) -> list[Spread]:
    """For each op of a run what it does in it.

    Args:
        ops: as they run; all in equally many slices.
    """
    if ops[0].by_slices is None or ops[0].by_slices.bands == 1:
        return [_WHOLE] * len(ops)
    wanted: dict[int, tuple[float, float]] = {}  # rows that later ops read above and below their band, by storage
    found: list[Spread] = []
    for op in reversed(ops):
        slices = op.by_slices
        assert slices is not None
        above = below = 0.0
        for storage in op.writes:
            if storage in wanted and storage not in slices.sums:
                above, below = max(above, wanted[storage][0]), max(below, wanted[storage][1])
        most = -(-slices.rows // slices.bands) + above + below
        twice = (slices.bands - 1) * (above + below) / slices.rows
        found.append(Spread(share=min(1.0, most / slices.rows), work=min(1.0 + twice, slices.bands)))
        for storage, reach in zip(slices.reads, slices.reaches, strict=True):
            before, after = wanted.get(storage, (0.0, 0.0))
            wanted[storage] = (
                max(before, above * reach.scale + reach.before),
                max(after, below * reach.scale + reach.after),
            )
    return found[::-1]
