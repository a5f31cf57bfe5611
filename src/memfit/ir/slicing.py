"""How an op runs slice by slice: what one slice is, and how much of operands and results it takes.

A slice is a few samples of the batch, or of these a tile in space, for which an op reads somewhat more than it makes.
`memfit.ir.fusion` has ops run so together, `memfit.ir.halo` adds up what tiles reach beyond each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

__all__ = ["SMALL_SUM_BYTES", "BySlices", "Reach"]

SMALL_SUM_BYTES = 1 << 16
"""Slices of sums of so many bytes or fewer are added up in twice the precision, beside the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Range of an operand that an op reads for a tile of its own, along one axis of space.

    For a tile from `a` to `b` it reads from `scale * a - before` to `scale * b + after`.
    """

    scale: float
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BySlices:
    """How an op runs slice by slice: a few samples of the batch at a time, or of these a tile in space.

    Attributes:
        batch: samples in all.
        samples: in one slice; the last slice may have fewer.
        seconds: profiled time of all slices.
        copy_seconds: time to put the slices of its first result together in memory of their own.
        copy_over_seconds: the same in memory that another storage leaves (`Storage.reusable`).
        workspace_bytes: memory one slice takes beyond what it reads and writes.
        reads: storages of which it reads the same samples as it writes, and about the same tile; of others it reads
            everything.
        sums: results that are sums over the batch: every slice makes one, as large as the whole, and they are added
            up.
        first: whether its first run can run so too; else only later ones do.
        accumulates: whether a slice is added to the sum while it is made, so that it takes no memory of its own.
        grid: into how many tiles samples are cut along each axis of space, such as height and width; empty if they
            are not.
        extents: along each of these axes, of what it makes, or of what it adds up.
        reaches: for each of `reads` what it reads of it along each of these axes.
    """

    batch: int
    samples: int
    seconds: float
    workspace_bytes: int
    reads: tuple[int, ...]
    copy_seconds: float = 0.0
    copy_over_seconds: float = 0.0
    sums: tuple[int, ...] = ()
    first: bool = False
    accumulates: bool = False
    grid: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()
    reaches: tuple[tuple[Reach, ...], ...] = ()

    @property
    def slices(self) -> int:
        """How many there are."""
        return -(-self.batch // self.samples) * prod(self.grid)

    @property
    def cut(self) -> tuple[int, ...]:
        """How it is cut; fused ops are cut alike."""
        return self.batch, self.samples, *self.grid

    def total_bytes(self, storage: int, nbytes: int) -> int:
        """Extra bytes to add up a result of so many bytes, beside the result, as long as there are slices."""
        return 2 * nbytes if storage in self.sums and not self.accumulates and nbytes <= SMALL_SUM_BYTES else 0

    def slice_bytes(self, storage: int, nbytes: int, share: float | None = None) -> int:
        """Bytes that the slice of a result of so many bytes takes.

        Args:
            storage: of the result.
            nbytes: its size.
            share: of its samples (`memfit.ir.halo`); by default one tile.
        """
        if storage in self.sums:
            return 0 if self.accumulates else nbytes
        of_samples = 1 / prod(self.grid) if share is None else share
        return ceil(nbytes * self.samples * of_samples / self.batch)
