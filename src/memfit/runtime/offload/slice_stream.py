"""Moves a tier-resident tensor slice by slice; memory holds only the slices that are in flight.

Fused ops ask for one slice after the other (`memfit.ops.batching.slices.SliceStream`). While compute reads one slice,
the next slice is swapped in. A written slice is swapped out in parallel with compute, and compute waits for it before
it fills the next slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memfit.ir.tiers import slot_bytes
from memfit.runtime.offload.backend import SwapSpace, Transfer

__all__ = ["MovingSlices", "SliceLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLayout:
    """Memory layout of the slices of a tensor: each slice is dense, with its axes in the same order as in the tensor.

    Attributes:
        shape: of the tensor.
        stride: of the tensor.
        dtype: of the tensor.
        device: where its slices are read and written.
        axis: axis of the samples.
        batch: number of samples in the tensor.
        samples: number of samples in one slice; the last slice may have fewer.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int
    batch: int
    samples: int

    @property
    def count(self) -> int:
        """How many slices there are."""
        return -(-self.batch // self.samples)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slice takes on a tier."""
        return slot_bytes(math.prod(self._shape(self.samples)) * self.dtype.itemsize)

    def empty(self, number: int) -> torch.Tensor:
        """Memory for a slice."""
        shape = self._shape(min(self.samples, self.batch - number * self.samples))
        stride, step = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: self.stride[axis]):
            stride[axis] = step
            step *= shape[axis]
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)

    def _shape(self, samples: int) -> list[int]:
        """Shape of a slice with the given number of samples."""
        rows = self.shape[self.axis] // self.batch * samples
        return [*self.shape[: self.axis], rows, *self.shape[self.axis + 1 :]]


class MovingSlices:
    """One pass over the slices of a tensor, all of them read or all of them written."""

    def __init__(
        self, layout: SliceLayout, space: SwapSpace, offset: int, transfers: list[Transfer], moved: Callable[..., None]
    ) -> None:
        """Begins with no slice in memory.

        Args:
            layout: of the slices.
            space: of the tier.
            offset: offset of the first slice in the space.
            transfers: list that holds each transfer until it was waited for.
            moved: called with the bytes that are swapped out or in.
        """
        self._layout = layout
        self._space = space
        self._offset = offset
        self._transfers = transfers
        self._moved = moved
        self._coming: dict[int, tuple[Transfer, torch.Tensor]] = {}
        self._filling: tuple[int, torch.Tensor] | None = None
        self._leaving: tuple[Transfer, torch.Tensor] | None = None

    def take(self, number: int) -> torch.Tensor:
        """Returns a slice that is swapped in, and starts to swap in the next slice."""
        self._start_in(number)
        transfer, tensor = self._coming.pop(number)
        self._wait(transfer)
        if number + 1 < self._layout.count:
            self._start_in(number + 1)
        return tensor

    def room(self, number: int) -> torch.Tensor:
        """Returns memory for a slice, once the previous slice is swapped out."""
        self.close()
        tensor = self._layout.empty(number)
        self._filling = number, tensor
        return tensor

    def send(self) -> None:
        """Starts to swap out the slice that `room` returned last."""
        assert self._filling is not None
        number, tensor = self._filling
        self._filling = None
        transfer = self._space.out(tensor, self._at(number))
        self._transfers.append(transfer)
        self._leaving = transfer, tensor
        self._moved(out_bytes=tensor.untyped_storage().nbytes())

    def close(self) -> None:
        """Waits until the last slice is swapped out."""
        if self._leaving is not None:
            self._wait(self._leaving[0])
            self._leaving = None

    def _start_in(self, number: int) -> None:
        if number not in self._coming:
            tensor = self._layout.empty(number)
            transfer = self._space.into(tensor, self._at(number))
            self._transfers.append(transfer)
            self._coming[number] = transfer, tensor
            self._moved(in_bytes=tensor.untyped_storage().nbytes())

    def _at(self, number: int) -> int:
        return self._offset + number * self._layout.slot_bytes

    def _wait(self, transfer: Transfer) -> None:
        transfer.wait()
        self._transfers.remove(transfer)
