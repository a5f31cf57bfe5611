"""A disk for small models: small chunks, and links so fast that plans use them."""

from __future__ import annotations

import pytest

from memfit.ir.tiers import SLOT_ALIGNMENT, Tier
from memfit.runtime.offload.link_benchmark import Calibration, LinkSpeed

FAST = LinkSpeed(
    alone_bytes_per_second=1e12,
    bytes_per_second=1e12,
    pageable_bytes_per_second=0.0,
    latency_seconds=0.0,
    compute_seconds_per_byte=0.0,
)


def make_small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of a kilobyte and more may be swapped, over a link that takes no time."""
    chunk = 2 * SLOT_ALIGNMENT
    buffers = 2 * (chunk + SLOT_ALIGNMENT) + 1024
    monkeypatch.setattr("memfit.planner.offload.model._LEAST_BYTES", 1024)
    monkeypatch.setattr("memfit.ir.streaming._LEAST_BYTES", 1024)
    monkeypatch.setattr("memfit.runtime.offload.disk._CHUNK_BYTES", chunk)
    monkeypatch.setattr("memfit.runtime.offload.link_benchmark.BUFFER_BYTES", buffers)
    known = Calibration(tier=Tier.DISK, device="cpu", out=FAST, into=FAST)
    monkeypatch.setattr("memfit.runtime.offload.tiers.calibrated", lambda *_: known)
