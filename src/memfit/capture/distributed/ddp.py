"""A module in `DistributedDataParallel`: memfit plans the inner module, and counts the buckets that DDP reduces.

Known limits: with `gradient_as_bucket_view` gradients count twice until the first step has run, as DDP copies each
gradient into its bucket when the gradient is made; communication hooks that compress gradients take more memory.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["bucket_bytes", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel`; any other module as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets in which `DistributedDataParallel` reduces gradients; 0 if they count as gradients."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    reduced = [
        p for name, p in model.module.named_parameters() if p.requires_grad and name not in model.parameters_to_ignore
    ]
    if model.gradient_as_bucket_view and any(p.grad is not None for p in reduced):
        return 0
    return sum(p.nbytes for p in reduced)
