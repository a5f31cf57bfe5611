"""The memory of a loss: while the loss runs, during the backward pass, and beyond the step.

Bytes are counted as the loss creates them, mostly on fake tensors. Three cases are not obvious:

- The number a loss returns may sit in a storage of the size of its operand (`memfit.capture.eager.resized_results`).
  The storage stays as long as the loss is referenced, so through the backward pass.
- The gradient of the loss itself, from which `backward` starts, lives until `backward` ends.
- A loss may keep tensors beyond the step: a centre, a queue, the last output. These tensors exist in each later step.

Known limits: memory that a kernel takes only while it runs (the backward of `soft_margin_loss`: two tensors) is not
counted; the proving run corrects for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.torch_compat.core import storage_references

__all__ = ["uses"]


def uses(tensors: Sequence[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """By storage, the number of tensors that refer to it, and its bytes; empty if torch cannot count references."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    counted = {key: (storage_references(storage), int(storage.nbytes())) for key, storage in storages.items()}
    return {key: (count, nbytes) for key, (count, nbytes) in counted.items() if count is not None}
