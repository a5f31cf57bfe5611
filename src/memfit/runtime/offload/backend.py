"""Interface of a tier for the steps that swap: space, and transfers that run beside compute."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["SwapSpace", "Transfer", "bytes_of"]


class Transfer(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Lets what follows in the step run after the transfer.

        Raises:
            SwapError: if it failed.
        """

    def done(self) -> bool:
        """Whether it has ended, well or not."""

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
            Where it begins.

        Raises:
            SwapError: if there is none.
        """

    def release(self, offset: int, nbytes: int) -> None:
        """Gives it back; no transfer may be in flight there."""

    def out(self, tensor: torch.Tensor, offset: int) -> Transfer:
        """Starts moving the bytes of a tensor's storage to the tier; the storage must not change until that is done."""

    def into(self, tensor: torch.Tensor, offset: int) -> Transfer:
        """Starts moving bytes from the tier into a tensor's storage."""

    def close(self) -> None:
        """Gives everything back."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
