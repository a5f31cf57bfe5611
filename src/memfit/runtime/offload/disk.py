"""The disk as a tier: one thread for each direction moves chunks between tensors and a swap file.

A direct transfer needs aligned memory and tensors are not aligned, so each thread copies chunk by chunk through a small
aligned buffer; the copy and the system calls run without Python's lock. Transfers of one direction run one after the
other, as in the simulator.

Tensors of a CUDA device go through the same buffers; the threads copy them on streams of their own.

Known limits: from a CUDA device, a chunk is written only after it has been copied, and the next chunk is copied after
that.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memfit.errors import SwapError
from memfit.ir.tiers import SLOT_ALIGNMENT, Tier, TransferSizes, slot_bytes
from memfit.runtime.offload.backend import bytes_of
from memfit.runtime.offload.slots import Places
from memfit.runtime.offload.swap_file import SwapFile

__all__ = ["DiskSpace", "buffer_bytes"]

_CHUNK_BYTES = TransferSizes().chunk_bytes
_TICKET_BYTES = 1024


def buffer_bytes(chunk_bytes: int) -> int:
    """Memory of a step in flight for the buffers of both threads and its tickets (`memfit.runtime.offload.engine`)."""
    return 2 * (chunk_bytes + SLOT_ALIGNMENT) + _TICKET_BYTES


_Bytes = NDArray[np.uint8] | torch.Tensor


@dataclass(frozen=True, slots=True)
class _DiskTransfer:
    future: Future[None]

    def wait(self) -> None:
        # Raised from the future, an error would hold the waiting frames, and with them the ticket of the step.
        error = self.future.exception()
        if isinstance(error, OSError):
            raise SwapError(
                f"moving a tensor to or from the disk failed: {error}; the step is lost: run it again, or set "
                "MEMFIT_SWAP_DIR to a directory on another disk and fit the model anew"
            ) from error
        if error is not None:
            raise error

    def done(self) -> bool:
        return self.future.done()

    def let_go(self) -> None:
        pass  # the thread holds the memory


class DiskSpace:
    """Space in a swap file, see `memfit.runtime.offload.backend.SwapSpace`."""

    def __init__(self, nbytes: int, limit_bytes: int | None = None, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Allocates space at once.

        Args:
            nbytes: bytes for one step.
            limit_bytes: limit for all steps in flight together.
            chunk_bytes: see `TransferSizes`.

        Raises:
            SwapError: if there is no room.
        """
        self._file = SwapFile(slot_bytes(nbytes))
        self._places = Places(Tier.DISK, limit_bytes, self._extended)
        self._lanes = [ThreadPoolExecutor(1, thread_name_prefix=f"memfit-swap-{way}") for way in ("out", "in")]
        self._buffers: list[NDArray[np.uint8]] = []
        self._chunk_bytes = chunk_bytes
        self._finalizer = weakref.finalize(self, _close, self._file, self._lanes)

    @property
    def reserved_bytes(self) -> int:
        """See `SwapSpace`."""
        return self._places.reserved_bytes

    def reserve(self, nbytes: int) -> int:
        """See `SwapSpace`."""
        offset = self._places.reserve(nbytes)
        self._buffers = self._buffers or [_buffer(self._chunk_bytes) for _ in self._lanes]
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        """See `SwapSpace`."""
        self._places.release(offset, nbytes)
        if not self.reserved_bytes:
            self._buffers = []

    def _extended(self, end: int, size: int) -> int:
        self._file.grow(end + size)
        return end

    def out(self, tensor: torch.Tensor, offset: int) -> _DiskTransfer:
        """See `SwapSpace`."""
        return self._start(tensor, offset, out=True)

    def into(self, tensor: torch.Tensor, offset: int) -> _DiskTransfer:
        """See `SwapSpace`."""
        return self._start(tensor, offset, out=False)

    def close(self) -> None:
        """See `SwapSpace`."""
        self._finalizer()

    def _start(self, tensor: torch.Tensor, offset: int, *, out: bool) -> _DiskTransfer:
        lane = 0 if out else 1
        memory, chunk, ready = [_source(tensor)], self._buffers[lane], _now(tensor)
        # The thread gets the file, not the space: with the last reference to the space it would have to close it.
        return _DiskTransfer(self._lanes[lane].submit(_move, self._file, memory, offset, chunk, ready, out=out))


class _Source(NamedTuple):
    """The bytes of a tensor's storage, and the storage that keeps them alive."""

    data: _Bytes
    storage: torch.UntypedStorage


def _move(
    file: SwapFile,
    memory: list[_Source],
    offset: int,
    chunk: NDArray[np.uint8],
    ready: torch.cuda.Event | None,
    *,
    out: bool,
) -> None:
    """Moves bytes chunk by chunk; empties the list, so that the memory is freed before the transfer is done."""
    with _copying(memory, ready) as moved:
        for start in range(0, len(moved), len(chunk)):
            part = moved[start : start + len(chunk)]
            copied, whole = chunk[: len(part)], chunk[: slot_bytes(len(part))].data
            if out:
                _copy(copied, part)
                file.write(whole, offset + start)
            else:
                file.read(whole, offset + start)
                _copy(part, copied)


@contextlib.contextmanager
def _copying(memory: list[_Source], ready: torch.cuda.Event | None) -> Iterator[_Bytes]:
    """The bytes to move; on CUDA, in a stream of their own that waits until the bytes are ready."""
    found = memory.pop()
    if ready is None:
        yield found.data
        return
    stream = torch.cuda.Stream(found.storage.device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        yield found.data
    stream.synchronize()


def _copy(target: _Bytes, source: _Bytes) -> None:
    """Copies and waits."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        target[:] = source
    elif isinstance(target, np.ndarray):
        assert isinstance(source, torch.Tensor)
        torch.from_numpy(target).copy_(source)
    else:
        assert isinstance(source, np.ndarray)
        target.copy_(torch.from_numpy(source))


def _now(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """On CUDA, an event after the work that is queued so far; None on CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _buffer(chunk_bytes: int) -> NDArray[np.uint8]:
    """Aligned memory for a chunk, allocated by torch so that memory measurements count it."""
    memory = torch.empty(chunk_bytes + SLOT_ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % SLOT_ALIGNMENT
    found: NDArray[np.uint8] = memory[start : start + chunk_bytes].numpy()
    return found


def _source(tensor: torch.Tensor) -> _Source:
    storage = tensor.untyped_storage()
    if tensor.is_cuda:
        return _Source(bytes_of(tensor), storage)
    raw: Any = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return _Source(np.frombuffer(raw, dtype=np.uint8), storage)


def _close(file: SwapFile, lanes: list[ThreadPoolExecutor]) -> None:
    for lane in lanes:
        lane.shutdown(wait=True, cancel_futures=True)
    file.close()
