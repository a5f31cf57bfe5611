"""Cuts the inputs of a step into micro-batches.

The batch is the first axis of the first tensor. Every tensor with a first axis of the same length is cut along this
axis; all other inputs, such as positions or a mask that all samples share, go whole to each micro-batch.

Known limits: a shared tensor whose first axis happens to have the length of the batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.errors import SpecError

__all__ = ["batch_size", "cut_batch", "first_samples", "sizes_of", "with_samples"]


def batch_size(leaves: Sequence[Any]) -> int:
    """The length of the batch.

    Raises:
        SpecError: if no input is a tensor with an axis.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise SpecError("a pipeline cuts the batch into micro-batches, and no input is a tensor with a first axis")


def sizes_of(batch: int, num_microbatches: int) -> list[int]:
    """The number of samples of each micro-batch: equal for all but the last, which takes the rest.

    Rounding up may leave fewer micro-batches than asked for: nine samples in six become five micro-batches.

    Raises:
        SpecError: if there are fewer samples than micro-batches.
    """
    if not 1 <= num_microbatches <= batch:
        raise SpecError(
            f"a batch of {batch} samples cannot be cut into {num_microbatches} micro-batches; "
            f"num_microbatches is from 1 to {batch}"
        )
    size = -(-batch // num_microbatches)
    full, rest = divmod(batch, size)
    return [size] * full + ([rest] if rest else [])


def cut_batch(leaves: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """The leaves of the inputs of each micro-batch, as views of the batch's leaves."""
    cut = with_samples(leaves)
    parts = [
        list(leaf.split(list(sizes))) if place in cut else [leaf] * len(sizes) for place, leaf in enumerate(leaves)
    ]
    return list(zip(*parts, strict=True))


def with_samples(leaves: Sequence[Any]) -> frozenset[int]:
    """Places of the leaves with one row per sample."""
    batch = batch_size(leaves)
    return frozenset(
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
    )


def first_samples(leaves: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The leaves of the inputs of a batch's first samples."""
    batch = batch_size(leaves)
    return cut_batch(leaves, [count, batch - count] if count < batch else [count])[0]
