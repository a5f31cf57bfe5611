"""Moves a tensor slice by slice: it lives on a tier, and memory holds the slices that are on their way.

Fused ops ask for one slice after the other (`memfit.ops.batching.slices.SliceStream`). While compute reads
one, the next is on its way back; one that leaves goes on its way beside compute, which waits for it before it fills
the next one.
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
    """How the slices of a tensor lie in memory: each dense, its axes in the order in which the tensor has them.

    Attributes:
        shape: of the tensor.
        stride: of the tensor.
        dtype: of the tensor.
        device: where its slices are read and written.
        axis: along which it has samples.
        batch: samples in all.
        samples: in one slice; the last slice may have fewer.
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
        """Of a slice of so many samples."""
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
            offset: where the first slice lies there.
            transfers: told of each transfer that is not waited for yet.
            moved: told of the bytes that leave and that come back.
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
        """A slice, brought back; the one after it starts on its way."""
        self._start_in(number)
        transfer, tensor = self._coming.pop(number)
        self._wait(transfer)
        if number + 1 < self._layout.count:
            self._start_in(number + 1)
        return tensor

    def room(self, number: int) -> torch.Tensor:
        """Memory for a slice, once the slice before it is away."""
        self.close()
        tensor = self._layout.empty(number)
        self._filling = number, tensor
        return tensor

    def send(self) -> None:
        """Starts moving away what `room` gave last."""
        assert self._filling is not None
        number, tensor = self._filling
        self._filling = None
        transfer = self._space.out(tensor, self._at(number))
        self._transfers.append(transfer)
        self._leaving = transfer, tensor
        self._moved(out_bytes=tensor.untyped_storage().nbytes())

    def close(self) -> None:
        """Waits until all of it is away."""
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
