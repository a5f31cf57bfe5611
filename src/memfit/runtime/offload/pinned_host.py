"""Pinned memory of the host as a tier of a CUDA device.

Copies out and copies in run on streams of their own. A copy out waits until compute has made the tensor; compute waits
for the copy before the tensor's memory is freed, so the allocator may give that memory to later ops. A copy in waits
until compute no longer uses the memory that the copy writes, and compute waits for the copy before it reads the tensor.
All waits happen on the device; the host never waits.

The pool is pinned once, at its exact size: torch's own pinned allocator would round the size up to a power of two.

Known limits: one device.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass

import torch

from memfit.errors import SwapError
from memfit.ir.tiers import Tier, slot_bytes
from memfit.runtime.offload.backend import bytes_of
from memfit.runtime.offload.slots import Places
from memfit.units import format_bytes

__all__ = ["HostSpace"]


@dataclass(frozen=True, slots=True)
class _HostTransfer:
    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def done(self) -> bool:
        return bool(self.event.query())

    def let_go(self) -> None:
        self.wait()  # on the device, which reuses the memory only after that


class HostSpace:
    """Pinned memory, see `memfit.runtime.offload.backend.SwapSpace`."""

    def __init__(self, nbytes: int, device: torch.device, limit_bytes: int | None = None) -> None:
        """Pins memory for one step.

        Args:
            nbytes: bytes for one step.
            device: of the tensors.
            limit_bytes: limit for all steps in flight together.

        Raises:
            SwapError: if the memory cannot be pinned.
        """
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in ("out", "in")]
        self._pools: list[torch.Tensor] = []
        self._places = Places(Tier.HOST, limit_bytes, self._extended)
        self._finalizer = weakref.finalize(self, _unpin, self._pools)
        self._add_pool(slot_bytes(nbytes))

    @property
    def reserved_bytes(self) -> int:
        """See `SwapSpace`."""
        return self._places.reserved_bytes

    def reserve(self, nbytes: int) -> int:
        """See `SwapSpace`; offsets count through all pools."""
        return self._places.reserve(nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """See `SwapSpace`."""
        self._places.release(offset, nbytes)

    def _extended(self, end: int, size: int) -> int:
        whole = sum(pool.numel() for pool in self._pools)
        if end + size <= whole:
            return end
        self._add_pool(size)  # no place lies in two pools
        return whole

    def _add_pool(self, nbytes: int) -> None:
        memory = torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)
        failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(failed):
            raise SwapError(
                f"cannot pin {format_bytes(nbytes)} of host memory (CUDA error {int(failed)}); give the host tier a "
                "lower limit, such as tiers='host:4GiB,disk'"
            )
        self._pools.append(memory)

    def out(self, tensor: torch.Tensor, offset: int) -> _HostTransfer:
        """See `SwapSpace`."""
        device_bytes = bytes_of(tensor)
        return self._copy(self._at(offset, device_bytes.numel()), device_bytes, self._streams[0])

    def into(self, tensor: torch.Tensor, offset: int) -> _HostTransfer:
        """See `SwapSpace`."""
        device_bytes = bytes_of(tensor)
        return self._copy(device_bytes, self._at(offset, device_bytes.numel()), self._streams[1])

    def close(self) -> None:
        """See `SwapSpace`."""
        self._finalizer()

    def _at(self, offset: int, nbytes: int) -> torch.Tensor:
        for pool in self._pools:
            if offset < pool.numel():
                return pool[offset : offset + nbytes]
            offset -= pool.numel()
        raise AssertionError("an offset beyond the pools")

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> _HostTransfer:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _HostTransfer(event, self._device)


def _unpin(pools: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    for pool in pools:
        torch.cuda.cudart().cudaHostUnregister(pool.data_ptr())
    pools.clear()
