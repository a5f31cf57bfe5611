"""The instructions of a program: a tagged union, one type for each kind.

In a file an instruction is a list that begins with its tag: `["c", 12, 1, null, false, false]` computes op 12,
`["c", 13, 8, 7, false, false]` computes op 13 in 8 chunks over the memory of storage 7, `["f", 5, false]` frees
storage 5, `["o", 5, "disk"]` swaps storage 5 out to the disk, `["i", 5]` swaps it in, and `["t", 5, "disk"]` says that
storage 5 lives on the disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from msgspec import Struct

from memfit.ir.fields import Count, Index
from memfit.ir.tiers import Tier

__all__ = [
    "Compute",
    "Free",
    "Instruction",
    "TierResident",
    "SwapIn",
    "SwapOut",
    "computes_in",
    "freed_in",
    "given_up",
]


class Compute(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True, tag="c"):
    """An op runs.

    Attributes:
        op: index of the op.
        chunks: number of chunks in which it runs, or of slices.
        over: storage whose memory its first result takes; None for memory of its own.
        sliced: whether it runs slice by slice.
        fused: whether it belongs to the same fused region as the next instruction (`memfit.ir.fusion`).
    """

    op: Index
    chunks: Count = 1
    over: Index | None = None
    sliced: bool = False
    fused: bool = False


class Free(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True, tag="f"):
    """A storage is freed.

    Attributes:
        storage: index of the storage.
        fused: whether the next instruction belongs to the same fused region.
    """

    storage: Index
    fused: bool = False


class SwapOut(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True, tag="o"):
    """The transfer of a storage to a tier starts.

    Its memory stays until it is freed or overwritten, which waits until the transfer is done. On the tier the storage
    stays until the step ends.
    """

    fused: ClassVar[bool] = False
    storage: Index
    tier: Tier


class SwapIn(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True, tag="i"):
    """Memory is taken for a storage, and its transfer back starts; ops that read it wait until the transfer is done."""

    fused: ClassVar[bool] = False
    storage: Index


class TierResident(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True, tag="t"):
    """A storage is tier-resident (`memfit.ir.streaming`); this is said before any op runs."""

    fused: ClassVar[bool] = False
    storage: Index
    tier: Tier


Instruction = Compute | Free | SwapOut | SwapIn | TierResident
"""One step of a program."""


def computes_in(instructions: Iterable[Instruction]) -> list[Compute]:
    """The instructions that run ops."""
    return [i for i in instructions if isinstance(i, Compute)]


def freed_in(instructions: Iterable[Instruction]) -> list[int]:
    """The storages that instructions free."""
    return [i.storage for i in instructions if isinstance(i, Free)]


def given_up(instruction: Instruction) -> int | None:
    """The storage whose memory an instruction frees or overwrites; None if there is none."""
    if isinstance(instruction, Free):
        return instruction.storage
    return instruction.over if isinstance(instruction, Compute) else None
