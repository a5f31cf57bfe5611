"""Tiers and the links to them: where swapped bytes go, and what moving them costs.

A link moves one transfer after the other, beside compute, and its two directions differ. A transfer takes its bytes
at the link's rate; it also takes compute something (on a CPU the copying thread and the kernels share cores), which
is counted where the transfer is issued.

Known limits: a rate does not depend on what compute does meanwhile, nor on what other tiers move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SLOT_ALIGNMENT", "Lanes", "Link", "Tier", "TierLinks", "slot_bytes"]

SLOT_ALIGNMENT = 4096
"""Bytes; what bypasses a page cache has to begin and end on such places."""


class Tier(StrEnum):
    """Where swapped bytes go."""

    HOST = "host"
    """Pinned memory of the machine a CUDA device sits in."""

    DISK = "disk"
    """A private file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between the device and a tier, measured beside compute.

    Attributes:
        bytes_per_second: of a transfer.
        latency_seconds: until a transfer begins.
        compute_seconds_per_byte: what a byte takes from compute.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    compute_seconds_per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Time of a transfer, in seconds."""
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLinks:
    """A tier, its two directions and how much it may hold.

    Attributes:
        tier: which one.
        out: from the device to the tier.
        into: back.
        limit_bytes: what it may hold; None for no limit.
        buffer_bytes: memory of the device that moving takes while a step is in flight.
    """

    tier: Tier
    out: Link
    into: Link
    limit_bytes: int | None = None
    buffer_bytes: int = 0


def slot_bytes(nbytes: int) -> int:
    """Bytes that a storage takes on a tier, where each begins on a page of its own."""
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Lanes:
    """The clocks of compute and of every link while a program is walked.

    Attributes:
        now: seconds of compute so far, stalls included; who runs an op adds its time.
        stalls: of them, by storage, what compute waited for its transfers.
        out_bytes: moved to tiers.
        in_bytes: moved back.
        tier_bytes: by tier, what was moved there; it stays until the step ends.
        link_seconds: what links are busy, together.
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
        """A transfer to a tier is issued."""
        self._tier_of[storage] = tier
        self.out_bytes += nbytes
        self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + nbytes
        links = self._links.get(tier)
        if links is not None:
            self._out_at[storage] = self._transfer(links.out, (tier, "out"), nbytes, self.now)

    def start_in(self, storage: int, nbytes: int) -> None:
        """A transfer back is issued; it begins when the one to the tier is done."""
        tier = self._tier_of.get(storage)
        self.in_bytes += nbytes
        links = None if tier is None else self._links.get(tier)
        if links is not None and tier is not None:
            earliest = max(self.now, self._out_at.get(storage, 0.0))
            self._in_at[storage] = self._transfer(links.into, (tier, "in"), nbytes, earliest)

    def wait_out(self, storage: int) -> None:
        """Compute waits until a storage is on its tier, if it is on its way."""
        self._wait(storage, self._out_at.pop(storage, 0.0))

    def wait_in(self, storage: int) -> None:
        """Compute waits until a storage is back, if it is on its way."""
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
