"""Functions that the graphs of a plan with swaps call: the transfers of one subgraph, for every step in flight.

Tensors are swapped out and in whole, or they are tier-resident and move slice by slice
(`memfit.runtime.offload.slice_stream`).

A step is identified by its *ticket*, a tensor of one number that the forward pass makes and saves for the backward pass
like any other tensor. So several steps may be in flight at once, each with its own place on the tiers. When autograd
drops a graph whose backward pass never ran, the ticket is freed and the place is free again.

Known limits: a second backward pass through the same graph finds its tensors only if the first one retained the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from memfit.errors import SwapError
from memfit.ir.tiers import Tier, slot_bytes
from memfit.runtime.offload.backend import SwapSpace, Transfer
from memfit.runtime.offload.slice_stream import MovingSlices, SliceLayout
from memfit.torch_compat.core import backward_keeps_graph

__all__ = ["Slot", "Swapper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The slot of a swapped storage of a subgraph.

    Attributes:
        tier: the tier of the storage.
        nbytes: bytes that the storage takes there.
    """

    tier: Tier
    nbytes: int


@dataclass(slots=True)
class _Step:
    """A step in flight.

    Attributes:
        places: by tier, the offset of its bytes.
        shapes: by storage, the metadata to make its tensor anew.
        leaving: by storage, the transfer that swaps it out, with the source tensor.
        coming: by storage, the transfer that swaps it in, with the target tensor.
        transfers: all transfers that were not waited for yet; the place can be given back when they are done.
    """

    places: dict[Tier, int]
    shapes: dict[int, tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=dict)
    leaving: dict[int, tuple[Transfer, torch.Tensor]] = field(default_factory=dict)
    coming: dict[int, tuple[Transfer, torch.Tensor]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)


class Swapper:
    """Moves the swapped storages of one subgraph."""

    def __init__(self, slots: Mapping[int, Slot], spaces: Mapping[Tier, SwapSpace]) -> None:
        """Assigns each storage an offset on its tier.

        Args:
            slots: the slots, by storage of the subgraph.
            spaces: the tiers.
        """
        self._spaces = spaces
        self._slots = dict(slots)
        self._offsets: dict[int, int] = {}
        self._tier_bytes: dict[Tier, int] = {}
        for storage, slot in slots.items():
            self._offsets[storage] = self._tier_bytes.get(slot.tier, 0)
            self._tier_bytes[slot.tier] = self._offsets[storage] + slot_bytes(slot.nbytes)
        self._steps: dict[int, _Step] = {}
        self._abandoned: deque[_Step] = deque()
        self._numbers = itertools.count()
        self.out_bytes = self.in_bytes = 0

    def begin(self) -> torch.Tensor:
        """Begins a step.

        Returns:
            The ticket of the step.

        Raises:
            SwapError: if a tier has no room for another step.
        """
        self._give_back()
        places: dict[Tier, int] = {}
        try:
            for tier, nbytes in self._tier_bytes.items():
                places[tier] = self._spaces[tier].reserve(nbytes)
        except SwapError:
            self._release(places)
            raise
        number = next(self._numbers)
        self._steps[number] = _Step(places)
        ticket = torch.tensor(number, device="cpu")  # independent of the default device
        weakref.finalize(ticket, self._abandon, number)
        return ticket

    def out(self, ticket: torch.Tensor, tensor: torch.Tensor, storage: int) -> None:
        """Starts to swap out a tensor; its memory must not change until `out_done`."""
        step, slot = self._step(ticket), self._slots[storage]
        found = tensor.untyped_storage().nbytes()
        if found > slot.nbytes:
            raise SwapError(f"a tensor to be swapped has {found} bytes, {slot.nbytes} were planned; fit the model anew")
        step.shapes[storage] = (
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            found,
        )
        tensor = tensor.detach()
        transfer = self._spaces[slot.tier].out(tensor, step.places[slot.tier] + self._offsets[storage])
        step.leaving[storage] = transfer, tensor
        step.transfers.append(transfer)
        self.out_bytes += found

    def out_done(self, ticket: torch.Tensor, storage: int) -> None:
        """Waits until a tensor is swapped out, and drops the reference to it."""
        step = self._step(ticket)
        leaving = step.leaving.pop(storage, None)
        if leaving is not None:
            leaving[0].wait()
            step.transfers.remove(leaving[0])

    def start_in(self, ticket: torch.Tensor, storage: int, device: torch.device) -> torch.Tensor:
        """Starts to swap in a tensor.

        Returns:
            The tensor, which must not be read before `in_done`.
        """
        step, slot = self._step(ticket), self._slots[storage]
        dtype, offset, shape, stride, nbytes = step.shapes[storage]
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=device).set_(memory, offset, shape, stride)
        transfer = self._spaces[slot.tier].into(tensor, step.places[slot.tier] + self._offsets[storage])
        step.coming[storage] = transfer, tensor
        step.transfers.append(transfer)
        self.in_bytes += nbytes
        return tensor

    def in_done(self, ticket: torch.Tensor, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        """Waits until a tensor is swapped in.

        Returns:
            The same tensor.
        """
        step = self._step(ticket)
        coming = step.coming.pop(storage, None)
        if coming is not None:
            coming[0].wait()
            step.transfers.remove(coming[0])
        return tensor

    def slices(self, ticket: torch.Tensor, storage: int, layout: SliceLayout) -> MovingSlices:
        """Begins to read or to write a tier-resident tensor, slice by slice.

        Raises:
            SwapError: if its slices are larger than planned.
        """
        step, slot = self._step(ticket), self._slots[storage]
        needed = layout.count * layout.slot_bytes
        if needed > slot.nbytes:
            raise SwapError(f"a tensor to be moved has {needed} bytes, {slot.nbytes} were planned; fit the model anew")
        offset = step.places[slot.tier] + self._offsets[storage]
        return MovingSlices(layout, self._spaces[slot.tier], offset, step.transfers, self._count)

    def _count(self, *, out_bytes: int = 0, in_bytes: int = 0) -> None:
        self.out_bytes += out_bytes
        self.in_bytes += in_bytes

    def end(self, ticket: torch.Tensor) -> None:
        """Ends the step and frees its place on the tiers, unless the graph is retained for another backward pass."""
        if not backward_keeps_graph():
            self._abandon(int(ticket))
            self._give_back()

    def _step(self, ticket: torch.Tensor) -> _Step:
        step = self._steps.get(int(ticket))
        if step is None:
            raise SwapError(
                "this graph's swapped tensors are gone: its backward pass has run; pass retain_graph=True to the first "
                "backward pass to run a second one"
            )
        return step

    def _abandon(self, number: int) -> None:
        """Forgets a step and its tensors; safe wherever Python collects garbage, so it takes no lock."""
        step = self._steps.pop(number, None)
        if step is not None:
            for transfer in step.transfers:
                transfer.let_go()
            step.leaving.clear()
            step.coming.clear()
            self._abandoned.append(step)

    def _give_back(self) -> None:
        """Frees the places of finished steps that have no transfer in flight."""
        for _ in range(len(self._abandoned)):
            step = self._abandoned.popleft()
            if all(transfer.done() for transfer in step.transfers):
                self._release(step.places)
            else:
                self._abandoned.append(step)

    def _release(self, places: Mapping[Tier, int]) -> None:
        for tier, place in places.items():
            self._spaces[tier].release(place, self._tier_bytes[tier])
