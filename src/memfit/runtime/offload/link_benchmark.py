"""Cost of moving bytes to a tier and back on this machine.

Each direction is measured alone and in parallel with compute, with the transfers that plans use. The measurement in
parallel with compute gives two numbers: the rate of the link, and the additional compute time for each byte, because
the copying threads and the kernels share cores or memory. The rates of the disk are those of the disk itself: transfers
bypass the page cache where they can.

The results are stored per machine in a private file, since measuring takes some seconds.

Known limits: compute is a mixture of matrix products and passes over memory, not the user's step.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from msgspec import Meta, Struct

from memfit.errors import MemfitError, PlanFileError, SwapError
from memfit.ir.fields import Rate, Seconds
from memfit.ir.jsonfile import read_json, write_json
from memfit.ir.tiers import Link, Tier, TierLinks, TransferSizes
from memfit.profiling.cost_cache import cache_directory, machine_name
from memfit.runtime.offload.backend import SwapSpace, Transfer, bytes_of
from memfit.runtime.offload.disk import DiskSpace, buffer_bytes
from memfit.runtime.offload.pinned_host import HostSpace
from memfit.runtime.offload.swap_file import swap_directory

__all__ = ["Calibration", "LinkSpeed", "calibrate", "calibrated", "keep"]

log = logging.getLogger(__name__)

_VERSION: Literal[1] = 1
_TRANSFER_BYTES = 32 << 20
_SECONDS = 0.3
_SIZES = TransferSizes()


class LinkSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a link.

    Attributes:
        alone_bytes_per_second: rate of the link alone.
        bytes_per_second: rate in parallel with compute.
        pageable_bytes_per_second: rate alone, with host memory that is not pinned; 0 where pinning does not apply.
        latency_seconds: duration of a small transfer.
        compute_seconds_per_byte: additional compute time for each byte.
    """

    alone_bytes_per_second: Rate
    bytes_per_second: Rate
    pageable_bytes_per_second: Annotated[float, Meta(ge=0, le=1e15)]
    latency_seconds: Seconds
    compute_seconds_per_byte: Seconds

    @property
    def link(self) -> Link:
        """Link that planners use: its rate in parallel with compute, its latency, and its slowdown of compute."""
        return Link(
            bytes_per_second=self.bytes_per_second,
            latency_seconds=self.latency_seconds,
            compute_seconds_per_byte=self.compute_seconds_per_byte,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measured links of a tier.

    Attributes:
        tier: the tier.
        device: device of the tensors.
        out: link to the tier.
        into: link from the tier.
        sizes: which storages are moved, and in which chunks.
    """

    tier: Tier
    device: str
    out: LinkSpeed
    into: LinkSpeed
    sizes: TransferSizes = _SIZES

    def links(self, limit_bytes: int | None = None) -> TierLinks:
        """Links of the tier in both directions, with its limit, as planners use them."""
        is_buffered = self.tier is Tier.DISK and self.device.startswith("cpu")
        return TierLinks(
            tier=self.tier,
            out=self.out.link,
            into=self.into.link,
            limit_bytes=limit_bytes,
            buffer_bytes=buffer_bytes(self.sizes.chunk_bytes) if is_buffered else 0,
            sizes=self.sizes,
        )


class _Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a calibration."""

    version: Literal[1]
    out: LinkSpeed
    into: LinkSpeed
    sizes: TransferSizes = _SIZES


def calibrated(tier: Tier, device: torch.device) -> Calibration:
    """Calibration of a tier, read from this machine's file, or measured now if there is none.

    Raises:
        SwapError: if the tier cannot be used.
    """
    path = _file(tier, device)
    try:
        read = read_json(path, _Measured)
        return Calibration(tier=tier, device=str(device), out=read.out, into=read.into, sizes=read.sizes)
    except (OSError, MemfitError):
        return calibrate(tier, device)


def calibrate(tier: Tier, device: torch.device, *, seconds: float = _SECONDS) -> Calibration:
    """Measures a tier anew and stores the result for this machine.

    Args:
        tier: the tier.
        device: of the tensors.
        seconds: about how long each measurement takes.

    Returns:
        The measured calibration.

    Raises:
        SwapError: if the tier cannot be used.
    """
    space: SwapSpace
    if tier is Tier.HOST:
        if device.type != "cuda":
            raise SwapError("tensors of a CPU are in the host's memory already; swap them to the disk: tiers='disk'")
        space = HostSpace(_TRANSFER_BYTES, device)
    else:
        space = DiskSpace(_TRANSFER_BYTES)
    try:
        tensor = torch.ones(_TRANSFER_BYTES // 4, device=device)
        small = torch.ones(1024, device=device)
        place = space.reserve(_TRANSFER_BYTES)
        speeds = [
            _speed(move, tensor, small, place, pageable, seconds)
            for move, pageable in ((space.out, _pageable_out), (space.into, _pageable_in))
        ]
    finally:
        space.close()
    try:
        sizes = read_json(_file(tier, device), _Measured).sizes  # sizes are chosen, and not measured
    except (OSError, MemfitError):
        sizes = _SIZES
    found = Calibration(tier=tier, device=str(device), out=speeds[0], into=speeds[1], sizes=sizes)
    try:
        keep(found)
    except (OSError, PlanFileError) as error:
        log.warning("cannot save measured links in %s: %s", cache_directory(), error)
    return found


def keep(found: Calibration) -> None:
    """Stores a calibration for this machine; from now on plans are made with it.

    Raises:
        OSError: if the file cannot be written.
        PlanFileError: if a number is not finite.
    """
    path = _file(found.tier, torch.device(found.device))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(path, _Measured(version=_VERSION, out=found.out, into=found.into, sizes=found.sizes))


_Move = Callable[[torch.Tensor, int], Transfer]


def _speed(
    move: _Move,
    tensor: torch.Tensor,
    small: torch.Tensor,
    place: int,
    pageable: Callable[..., None],
    seconds: float,
) -> LinkSpeed:
    """Measures one direction."""
    device = tensor.device

    def transfer(what: torch.Tensor) -> None:
        move(what, place).wait()
        _synchronize(device)

    transfer(tensor)
    alone = _rate(lambda: transfer(tensor), tensor, seconds)
    latency = min(_seconds(lambda: transfer(small)) for _ in range(20))
    rates: list[float] = []
    taken: list[float] = []
    for rate, per_byte in _beside_compute(lambda: move(tensor, place), device, seconds):
        rates.append(rate)
        taken.append(per_byte)
    middle = len(rates) // 2
    unpinned = _rate(lambda: pageable(tensor), tensor, seconds) if device.type == "cuda" else 0.0
    return LinkSpeed(
        alone_bytes_per_second=alone,
        bytes_per_second=min(alone, sorted(rates)[middle]),
        pageable_bytes_per_second=unpinned,
        latency_seconds=latency,
        compute_seconds_per_byte=max(0.0, sorted(taken)[middle]),
    )


def _beside_compute(
    start: Callable[[], Transfer], device: torch.device, seconds: float
) -> Iterator[tuple[float, float]]:
    """Rates in parallel with compute, and compute time lost per byte; compute runs without, with, without transfers."""
    compute = _Compute(device)
    compute.run(3)
    count = max(4, int(seconds / max(1e-6, _seconds(lambda: compute.run(1)))))
    for _ in range(3):
        before = _seconds(lambda: compute.run(count))
        moved, transfer = 0, start()
        begin = time.perf_counter()
        for _ in range(count):
            compute.run(1)
            if transfer.done():
                moved, transfer = moved + _TRANSFER_BYTES, start()
        beside = time.perf_counter() - begin
        transfer.wait()
        _synchronize(device)
        moved += _TRANSFER_BYTES
        elapsed = time.perf_counter() - begin
        after = _seconds(lambda: compute.run(count))
        yield moved / elapsed, (beside - (before + after) / 2) / (moved * beside / elapsed)


class _Compute:
    """Compute like that of a training step: matrix products and passes over memory."""

    def __init__(self, device: torch.device) -> None:
        size = 512 if device.type == "cpu" else 2048
        self.device = device
        own = torch.Generator(device).manual_seed(0)  # the user's random state stays unchanged
        self.left = torch.randn(size, size, device=device, generator=own)
        self.long = torch.randn(size * size * 8, device=device, generator=own)

    def run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.left, self.left)
            torch.mm(self.left, self.left)
            self.long.relu_()
        _synchronize(self.device)


def _pageable_out(tensor: torch.Tensor) -> None:
    bytes_of(tensor).cpu()


def _pageable_in(tensor: torch.Tensor) -> None:
    bytes_of(tensor).copy_(torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu"))
    _synchronize(tensor.device)


def _rate(run: Callable[[], None], tensor: torch.Tensor, seconds: float) -> float:
    """Bytes per second, the median of several runs."""
    found: list[float] = []
    while sum(found) < seconds / 2 or len(found) < 3:
        found.append(_seconds(run))
    return tensor.untyped_storage().nbytes() / sorted(found)[len(found) // 2]


def _seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _file(tier: Tier, device: torch.device) -> Path:
    """Path of the stored numbers of a tier; a disk is identified by its file system."""
    where = swap_directory().stat().st_dev if tier is Tier.DISK else ""
    digest = hashlib.sha256(f"{machine_name(device)} {tier} {where}".encode()).hexdigest()[:16]
    return cache_directory() / f"link-{digest}.json"
