"""How an op runs slice by slice: the extent of one slice, and how much of operands and results it takes.

A slice is a few samples of the batch, or a tile in space of these samples; for a tile an op reads somewhat more than it
makes. `memfit.ir.fusion` fuses ops that run by slices, `memfit.ir.halo` adds up how far tiles reach beyond each other.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Annotated

from msgspec import Meta, Struct

from memfit.ir.fields import Bytes, Count, Indices, Number, Seconds

__all__ = ["SMALL_SUM_BYTES", "BySlices", "Reach"]

SMALL_SUM_BYTES = 1 << 16
"""Slices of sums of at most this many bytes are added up in twice the precision, in extra memory."""


class Reach(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Range of an operand that an op reads for a tile of its own, along one axis of space.

    For a tile from `a` to `b` the op reads from `scale * a - before` to `scale * b + after`.
    """

    scale: Number
    before: Number
    after: Number


class BySlices(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an op runs slice by slice: a few samples of the batch at a time, or a tile in space of these.

    Attributes:
        batch: samples in all.
        samples: samples in one slice; the last slice may have fewer.
        seconds: profiled time of all slices.
        copy_seconds: time to put the slices of its first result together in new memory.
        copy_over_seconds: the same in the memory of another storage that is not needed any more (`Storage.reusable`).
        workspace_bytes: memory one slice takes beyond its operands and results.
        reads: operands of which a slice reads the same samples as it writes, and about the same tile; it reads other
            operands whole.
        sums: results that are sums over the batch: every slice makes a partial sum, as large as the result, and these
            are added up.
        first: whether the first run can be by slices too; else only recomputations can.
        accumulates: whether a partial sum is added to the sum while it is made, so that it takes no memory of its own.
        grid: number of tiles into which samples are cut along each axis of space, such as height and width; empty if
            they are not cut.
        extents: size along each of these axes, of its result or of the gradient that it adds up.
        reaches: for each operand in `reads` the range that it reads of it along each of these axes.
    """

    batch: Count
    samples: Count
    seconds: Seconds
    workspace_bytes: Bytes
    reads: Indices
    copy_seconds: Seconds = 0.0
    copy_over_seconds: Seconds = 0.0
    sums: Indices = ()
    first: bool = False
    accumulates: bool = False
    grid: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()
    extents: Annotated[tuple[Count, ...], Meta(max_length=2)] = ()
    reaches: Annotated[tuple[Annotated[tuple[Reach, ...], Meta(max_length=2)], ...], Meta(max_length=1_000)] = ()

    @property
    def slices(self) -> int:
        """The number of slices."""
        return -(-self.batch // self.samples) * prod(self.grid)

    @property
    def cut(self) -> tuple[int, ...]:
        """How the batch is cut into slices; fused ops are cut alike."""
        return self.batch, self.samples, *self.grid

    def total_bytes(self, storage: int, nbytes: int) -> int:
        """Extra bytes to add up a result of `nbytes`, on top of the result, as long as there are slices."""
        return 2 * nbytes if storage in self.sums and not self.accumulates and nbytes <= SMALL_SUM_BYTES else 0

    def slice_bytes(self, storage: int, nbytes: int, share: float | None = None) -> int:
        """Bytes that a slice of a result takes.

        Args:
            storage: storage of the result.
            nbytes: size of the result.
            share: part of its samples that is made at once (`memfit.ir.halo`); by default one tile.
        """
        if storage in self.sums:
            return 0 if self.accumulates else nbytes
        of_samples = 1 / prod(self.grid) if share is None else share
        return ceil(nbytes * self.samples * of_samples / self.batch)
