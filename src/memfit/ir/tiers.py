"""Tiers and the links to them: where swapped bytes go, and the cost of moving them.

A link runs one transfer after the other, in parallel with compute, and the two directions differ. A transfer moves its
bytes at the rate of the link; it also takes time from compute (on a CPU the copying thread and the kernels share
cores), which is counted where the transfer is issued.

Known limits: a rate does not depend on the ops that run meanwhile, nor on transfers of other tiers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from memfit.ir.fields import Bytes, Rate, Seconds

__all__ = ["SLOT_ALIGNMENT", "Lanes", "Link", "Tier", "TierLinks", "TransferSizes", "slot_bytes"]

SLOT_ALIGNMENT = 4096
"""Bytes; transfers that bypass the page cache have to begin and end at multiples of this number."""


class Tier(StrEnum):
    """Where swapped bytes go."""

    HOST = "host"
    """Pinned memory of the host of a CUDA device."""

    DISK = "disk"
    """A private file."""


class Link(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One direction between the device and a tier, measured while compute runs.

    Attributes:
        bytes_per_second: rate of a transfer.
        latency_seconds: time until a transfer begins.
        compute_seconds_per_byte: time that a byte takes from compute.
    """

    bytes_per_second: Rate
    latency_seconds: Seconds = 0.0
    compute_seconds_per_byte: Seconds = 0.0

    def seconds(self, nbytes: int) -> float:
        """Time of a transfer, in seconds."""
        return self.latency_seconds + nbytes / self.bytes_per_second


class TransferSizes(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sizes from which transfers to a tier are worth their latency.

    Attributes:
        chunk_bytes: the disk moves a storage in chunks of so many bytes, each through a buffer; a multiple of
            `SLOT_ALIGNMENT`.
        least_bytes: smaller storages are not swapped.
        least_tier_resident_bytes: smaller storages do not live on the tier, since their slices are smaller still.
    """

    chunk_bytes: Annotated[int, Meta(ge=SLOT_ALIGNMENT, le=2**30, multiple_of=SLOT_ALIGNMENT)] = 1 << 20
    least_bytes: Bytes = 1 << 16
    least_tier_resident_bytes: Bytes = 1 << 18


class TierLinks(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tier, its two directions and how much it may hold.

    Attributes:
        tier: the tier.
        out: link from the device to the tier.
        into: link from the tier to the device.
        limit_bytes: bytes that the tier may hold; None for no limit.
        buffer_bytes: device memory that transfers take while a step is in flight.
        sizes: which storages are moved, and in which chunks.
    """

    tier: Tier
    out: Link
    into: Link
    limit_bytes: Bytes | None = None
    buffer_bytes: Bytes = 0
    sizes: TransferSizes = TransferSizes()


def slot_bytes(nbytes: int) -> int:
    """Bytes that a storage takes on a tier, where each storage begins on a page of its own."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Lanes:
    """The clocks of compute and of every link while a program is walked.

    Attributes:
        now: seconds of compute so far, stalls included; the caller adds the time of each op that it runs.
        stalls: the part of `now`, by storage, that compute waited for transfers of the storage.
        out_bytes: bytes moved to tiers.
        in_bytes: bytes moved back.
        tier_bytes: by tier, bytes moved there; they stay until the step ends.
        link_seconds: time for which links are busy, added up over all links.
    """

    def __init__(self, tiers: tuple[TierLinks, ...]) -> None:
        self.now = 0.0
        self.stalls: dict[int, float] = {}
        self.out_bytes = self.in_bytes = 0
        self.tier_bytes: dict[Tier, int] = {}
        self.link_seconds = 0.0
        self._links = {links.tier: links for links in tiers}
        self._free_at: dict[tuple[Tier, str], float] = {}
        self._tier_of: dict[int, Tier] = {}
        self._out_at: dict[int, float] = {}
        self._in_at: dict[int, float] = {}

    def start_out(self, storage: int, nbytes: int, tier: Tier) -> None:
        """Issues a transfer to a tier."""
        self._tier_of[storage] = tier
        self.out_bytes += nbytes
        self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + nbytes
        links = self._links.get(tier)
        if links is not None:
            self._out_at[storage] = self._transfer(links.out, (tier, "out"), nbytes, self.now)

    def start_in(self, storage: int, nbytes: int) -> None:
        """Issues a transfer back; it begins when the transfer to the tier is done."""
        tier = self._tier_of.get(storage)
        self.in_bytes += nbytes
        links = None if tier is None else self._links.get(tier)
        if links is not None and tier is not None:
            earliest = max(self.now, self._out_at.get(storage, 0.0))
            self._in_at[storage] = self._transfer(links.into, (tier, "in"), nbytes, earliest)

    def wait_out(self, storage: int) -> None:
        """Makes compute wait until a storage is on its tier, if its transfer is not done."""
        self._wait(storage, self._out_at.pop(storage, 0.0))

    def wait_in(self, storage: int) -> None:
        """Makes compute wait until a storage is back, if its transfer is not done."""
        self._wait(storage, self._in_at.pop(storage, 0.0))

    def _transfer(self, link: Link, lane: tuple[Tier, str], nbytes: int, earliest: float) -> float:
        took = link.seconds(nbytes)
        self.link_seconds += took
        done = max(self._free_at.get(lane, 0.0), earliest) + took
        self._free_at[lane] = done
        self.now += nbytes * link.compute_seconds_per_byte
        return done

    def _wait(self, storage: int, until: float) -> None:
        if until > self.now:
            self.stalls[storage] = self.stalls.get(storage, 0.0) + until - self.now
            self.now = until
