"""What an op makes in a run that goes tile by tile: its tile, and what the ops after it need beyond that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.ir.fusion import bytes_beside, fused_seconds
from memfit.ir.graph import Op, Phase, StepGraph, Storage, StorageKind
from memfit.ir.halo import Spread, spreads
from memfit.ir.slicing import BySlices, Reach

SAME, CONVOLUTION = Reach(scale=1, before=0, after=0), Reach(scale=1, before=1, after=1)
HALVED = Reach(scale=2, before=1, after=0)


def op(number: int, reach: Reach, *, extent: int = 12, sums: bool = False) -> Op:
    """Reads the storage before it; cut into three tiles of its height and two of its width."""
    return Op(
        name=str(number),
        target="t",
        phase=Phase.FORWARD,
        reads=(number,),
        writes=(number + 1,),
        by_slices=BySlices(
            batch=1,
            samples=1,
            seconds=6.0,
            workspace_bytes=60,
            reads=(number,),
            sums=(number + 1,) if sums else (),
            grid=(3, 2),
            extents=(extent, extent),
            reaches=((reach, SAME),),
        ),
    )


def test_each_op_makes_what_the_next_reads() -> None:
    first, second, last = spreads([op(0, CONVOLUTION), op(1, CONVOLUTION), op(2, CONVOLUTION)])
    assert last == Spread(share=pytest.approx(4 / 12 / 2), work=1.0)
    assert second == Spread(share=pytest.approx(6 / 12 / 2), work=pytest.approx((5 + 6 + 5) / 12))
    assert first == Spread(share=pytest.approx(8 / 12 / 2), work=pytest.approx((6 + 8 + 6) / 12))


def test_a_halo_grows_and_shrinks_with_the_image() -> None:
    large, small = spreads([op(0, CONVOLUTION), op(1, HALVED, extent=6)])
    assert small.share == pytest.approx(2 / 6 / 2)
    assert large.share == pytest.approx((4 + 1) / 12 / 2)
    both = spreads([op(0, CONVOLUTION), op(1, HALVED, extent=6), op(2, CONVOLUTION, extent=6)])
    assert both[0].share == pytest.approx((4 + 2 + 1 + 2) / 12 / 2)


def test_what_is_added_up_is_made_for_each_tile_once() -> None:
    total = op(1, CONVOLUTION, sums=True)
    reader = replace(op(3, SAME), reads=(1,), writes=(4,))
    assert spreads([op(0, SAME), total, reader])[1] == Spread(share=pytest.approx(1 / 6), work=1.0)
    assert spreads([op(0, SAME), total])[0].work > 1


def test_more_tiles_than_there_is_to_halve_make_everything_at_most() -> None:
    wide = Reach(scale=1, before=40, after=40)
    first, _ = spreads([op(0, SAME), op(1, wide)])
    assert first.share == pytest.approx(1 / 2)
    assert first.work == 3


def test_bytes_and_seconds_count_the_halo() -> None:
    ops = [op(0, SAME), op(1, CONVOLUTION)]
    kinds = (StorageKind.STATIC, StorageKind.FORWARD, StorageKind.FORWARD)
    storages = tuple(Storage(name=str(n), nbytes=1200, kind=kind) for n, kind in enumerate(kinds))
    graph = StepGraph(ops=tuple(ops), storages=storages)
    assert fused_seconds(ops, {1, 2}, [None, None]) == [pytest.approx(6 * (1 + 2 * 2 / 12)), 6.0]
    halo, tile = 1200 * 6 // 12 // 2, 1200 * 4 // 12 // 2
    assert bytes_beside(graph, ops, [(), (1,)]) == [halo + 60 * 6 * 6 // 12 // 2, halo + tile + 60, tile]
