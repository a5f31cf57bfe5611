"""Which rows each op of a run makes for each band, when ops run as one, band of rows after band.

From what stays after the run, cut into bands that share no row, each op's rows are found backwards: those that the ops
after it need (`memfit.capture.by_rows`). What is added up is made for its own band only, so that nothing counts twice.

Known limits: rows that two bands need are made twice rather than kept in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from memfit.capture.again import Call
from memfit.capture.by_rows import Range, Rows, bands_of
from memfit.capture.by_samples import sums_of

__all__ = ["Band", "BandedOp", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandedOp:
    """One op of a run.

    Attributes:
        call: what is called.
        rows: how it runs on a band of rows.
        operands: storages of `rows.operands`.
        results: its storages that are wanted, with their place among its results.
    """

    call: fx.Node | Call
    rows: Rows
    operands: tuple[int, ...]
    results: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Band:
    """What one op does for one band.

    Attributes:
        rows: from the first to before the last it makes.
        taken: for each operand where the rows it needs start and how many they are.
    """

    rows: Range
    taken: tuple[Range, ...]


def schedule(ops: Sequence[BandedOp], stays: Mapping[int, int], bands: int) -> list[list[Band]]:
    """For each band what each op does.

    Args:
        ops: in their order.
        stays: rows of the results that stay, by storage.
        bands: how many.

    Returns:
        Where rows are taken from a result of the run they count from the first one made for the band, else from the
        first one there is.
    """
    return [
        _band(ops, {s: bands_of(rows, bands)[band] for s, rows in stays.items()}, band, bands) for band in range(bands)
    ]


def _band(ops: Sequence[BandedOp], wanted: dict[int, Range], band: int, bands: int) -> list[Band]:
    ranges: list[Range] = []
    for op in reversed(ops):
        here = None
        for storage, place in op.results.items():
            if storage in wanted and place not in sums_of(op.call):
                here = _hull(here, wanted[storage])
        here = here or bands_of(op.rows.rows, bands)[band]
        ranges.append(here)
        for storage, needed in zip(op.operands, op.rows.needs(*here), strict=True):
            wanted[storage] = _hull(wanted.get(storage), needed)
    first: dict[int, int] = {}
    found: list[Band] = []
    for op, here in zip(ops, reversed(ranges), strict=True):
        needs = zip(op.operands, op.rows.needs(*here), strict=True)
        taken = tuple((start - first.get(s, 0), stop - start) for s, (start, stop) in needs)
        first.update(dict.fromkeys(op.results, here[0]))
        found.append(Band(rows=here, taken=taken))
    return found


def _hull(one: Range | None, other: Range) -> Range:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))
