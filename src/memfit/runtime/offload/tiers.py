"""Tiers of a request, each with its measured links and its limit.

`"host,disk"` uses the host first and the disk for the remaining bytes; `"host:4GiB,disk:100GiB"` limits each tier.
"""

from __future__ import annotations

import os

import torch

from memfit.device_memory import free_bytes
from memfit.errors import SpecError
from memfit.ir.tiers import Tier, TierLinks
from memfit.runtime.offload.link_benchmark import calibrated
from memfit.runtime.offload.swap_file import swap_directory
from memfit.units import parse_bytes

__all__ = ["parse_tiers", "tier_links"]

_HOST_SHARE = 0.5
_DISK_SHARE = 0.9
"""Shares of the free host memory and of the free disk space that a tier without a limit may take."""


def parse_tiers(tiers: str | None, device: torch.device) -> dict[Tier, int | None]:
    """Tiers with their limits, the first choice first.

    Args:
        tiers: such as `"host"`, `"disk"`, `"host:4GiB,disk"`, `"none"`; None for the host on CUDA and no swap on CPU.
        device: where the step runs.

    Raises:
        SpecError: if a tier does not exist, or not for this device.
    """
    text = ("host" if device.type == "cuda" else "none") if tiers is None else tiers
    found: dict[Tier, int | None] = {}
    for entry in () if text == "none" else text.split(","):
        name, colon, limit = entry.strip().partition(":")
        if name not in [str(tier) for tier in Tier] or Tier(name) in found:
            raise SpecError(
                "tiers are 'host', 'disk', both with a comma, each perhaps with a limit as in 'host:4GiB,disk', or "
                f"'none' (tiers: {tiers!r})"
            )
        if name == Tier.HOST and device.type != "cuda":
            raise SpecError(f"on a CPU the host's memory is the device; swap to the disk: 'disk' (tiers: {tiers!r})")
        found[Tier(name)] = parse_bytes(limit) if colon else None
    return found


def tier_links(tiers: str | None, device: torch.device) -> tuple[TierLinks, ...]:
    """The tiers of a request; measures a tier that was not measured before.

    Raises:
        SpecError: as `parse_tiers`.
        SwapError: if a tier cannot be used.
    """
    wanted = parse_tiers(tiers, device)
    return tuple(
        calibrated(tier, device).links(_free(tier) if limit is None else limit) for tier, limit in wanted.items()
    )


def _free(tier: Tier) -> int:
    if tier is Tier.HOST:
        return int(_HOST_SHARE * free_bytes(torch.device("cpu")))
    facts = os.statvfs(swap_directory())
    return int(_DISK_SHARE * facts.f_bavail * facts.f_frsize)
