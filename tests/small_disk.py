"""Links to a disk that tests know beforehand, so that nothing is measured and plans do not depend on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.ir.tiers import SLOT_ALIGNMENT, Tier, TransferSizes
from memfit.profiling.cost_cache import cache_directory
from memfit.runtime.offload.link_benchmark import Calibration, LinkSpeed, keep

__all__ = ["keep_disk", "make_small_disk"]

SMALL = TransferSizes(chunk_bytes=2 * SLOT_ALIGNMENT, least_bytes=1024, least_tier_resident_bytes=1024)


def keep_disk(bytes_per_second: float, sizes: TransferSizes = TransferSizes(), device: str = "cpu") -> None:  # noqa: B008
    """Stores a disk of this rate in the cache, as if it had been measured."""
    speed = LinkSpeed(
        alone_bytes_per_second=bytes_per_second,
        bytes_per_second=bytes_per_second,
        pageable_bytes_per_second=0.0,
        latency_seconds=0.0,
        compute_seconds_per_byte=0.0,
    )
    keep(Calibration(tier=Tier.DISK, device=device, out=speed, into=speed, sizes=sizes))


def make_small_disk(monkeypatch: pytest.MonkeyPatch, directory: Path, rate: float = 1e12) -> None:
    """Everything of a kilobyte and more may be swapped, by default over a link that takes no time.

    The test gets a cache of its own, with the costs of ops that all tests share.
    """
    costs = [path for path in cache_directory().glob("*") if not path.name.startswith("link-")]
    directory.mkdir(mode=0o700, exist_ok=True)
    for path in costs:
        (directory / path.name).symlink_to(path)
    monkeypatch.setenv("MEMFIT_CACHE", str(directory))
    keep_disk(rate, SMALL)
