"""Opens the tiers that a program swaps to, with the space of one step."""

from __future__ import annotations

import torch

from memfit.ir.graph import StepGraph
from memfit.ir.program import Program
from memfit.ir.streaming import tier_bytes
from memfit.ir.tiers import Tier, TransferSizes, slot_bytes
from memfit.runtime.offload.backend import SwapSpace
from memfit.runtime.offload.disk import DiskSpace
from memfit.runtime.offload.pinned_host import HostSpace

__all__ = ["open_spaces"]


def open_spaces(graph: StepGraph, program: Program, device: torch.device) -> dict[Tier, SwapSpace]:
    """Opens the tiers that a program uses.

    Args:
        graph: the step, which states the limit of each tier.
        program: a program of the step.
        device: where the step runs.

    Raises:
        SwapError: if there is no room.
    """
    nbytes: dict[Tier, int] = {}
    for storage, tier in program.swapped().items():
        nbytes[tier] = nbytes.get(tier, 0) + slot_bytes(graph.storages[storage].nbytes)
    for storage, tier in program.tier_resident().items():
        nbytes[tier] = nbytes.get(tier, 0) + tier_bytes(graph, storage)
    links_of = {links.tier: links for links in graph.tiers}
    spaces: dict[Tier, SwapSpace] = {}
    for tier, wanted in nbytes.items():
        links = links_of.get(tier)
        limit = None if links is None else links.limit_bytes
        if tier is Tier.HOST:
            spaces[tier] = HostSpace(wanted, device, limit)
        else:
            sizes = TransferSizes() if links is None else links.sizes
            spaces[tier] = DiskSpace(wanted, limit, chunk_bytes=sizes.chunk_bytes)
    return spaces
