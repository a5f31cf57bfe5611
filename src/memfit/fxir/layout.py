"""How the tensors of a call lie in memory: along which axis they have samples, and whether two are the same view.

The fake tensors of a graph have the strides of real tensors and share storages as real tensors do, so this analysis
needs no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memfit.fxir.call import Call

__all__ = ["is_alone", "looks_alike", "nodes_of", "outer_axis", "owns_memory", "results_in", "results_of"]


def results_in(value: object) -> Sequence[object]:
    """Results in the value that a call returned, in their order."""
    return value if isinstance(value, list | tuple) else [value]


def results_of(call: fx.Node | Call) -> Sequence[object]:
    """Results of a call, from its metadata, in their order."""
    return results_in(call.meta.get("val"))


def outer_axis(tensor: object, batch: int) -> int | None:
    """The axis along which a tensor has samples, each dense, in memory that holds nothing else; None without one."""
    if not isinstance(tensor, torch.Tensor) or not is_alone(tensor):
        return None
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride * size == tensor.numel():
            return axis if size % batch == 0 else None
    return None


def looks_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage are the same view of it, including the lazy conjugate and negative bits."""
    alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    lazy = (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    return alike and lazy and bool(one.storage_offset() == other.storage_offset())


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its whole storage."""
    nbytes = tensor.numel() * tensor.element_size()
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes)


def owns_memory(node: fx.Node) -> bool:
    """Whether a result lies in CPU memory that holds nothing else, so that another result can reuse it."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and is_alone(value)


def nodes_of(arguments: Any) -> list[fx.Node]:
    """The operands in order, including operands in lists."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found
