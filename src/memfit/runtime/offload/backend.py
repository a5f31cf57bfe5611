"""Interface of a tier for steps that swap: space, and transfers that run in parallel with compute."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["SwapSpace", "Transfer", "bytes_of"]


class Transfer(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Makes later work of the step run after the transfer.

        Raises:
            SwapError: if the transfer failed.
        """

    def done(self) -> bool:
        """Whether the transfer has ended, with or without an error."""

    def let_go(self) -> None:
        """Makes it safe to drop the tensor, whose transfer may still be in flight."""


class SwapSpace(Protocol):
    """Space on a tier."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the space that steps hold now."""

    def reserve(self, nbytes: int) -> int:
        """Takes space for one step.

        Returns:
            The offset where the space begins.

        Raises:
            SwapError: if there is no space.
        """

    def release(self, offset: int, nbytes: int) -> None:
        """Gives space back; no transfer may be in flight there."""

    def out(self, tensor: torch.Tensor, offset: int) -> Transfer:
        """Starts to move a tensor's storage to the tier; the storage must not change until the transfer is done."""

    def into(self, tensor: torch.Tensor, offset: int) -> Transfer:
        """Starts to move bytes from the tier into a tensor's storage."""

    def close(self) -> None:
        """Gives all space back."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
