"""Inputs of a step that planning may use: the same memory, cut off the graph that the caller's code made them in.

A model inside a larger one gets tensors that other modules made. Planned steps differentiate them, and must stop there:
neither is the caller's graph gone through, which would add to gradients and free what it saved, nor does a leaf of the
caller's receive a gradient.

Known limits: tensors inside of objects that pytree does not know, other than plain instances with attributes, are as
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["DetachedInputs", "detached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedInputs:
    """Inputs that are cut off the caller's graph.

    Attributes:
        args: positional ones.
        kwargs: keyword ones.
        leaves: the leaves that receive their gradients, in the order of the inputs.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[torch.Tensor, ...]


class _Alias(torch.autograd.Function):
    """The same tensor, as the result of an op: what autograd lets a model write over, as it does for the caller's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def detached(args: Sequence[Any], kwargs: dict[str, Any]) -> DetachedInputs:
    """The inputs, with tensors of a graph made leaves (or results of an op on a leaf) that share their memory.

    A tensor that comes twice stays one.
    """
    known: dict[int, Any] = {}
    leaves: list[torch.Tensor] = []

    def cut(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = _cut(value, cut, leaves)
        return known[id(value)]

    cut_args, cut_kwargs = pytree.tree_map(cut, (tuple(args), dict(kwargs)))
    return DetachedInputs(args=cut_args, kwargs=cut_kwargs, leaves=tuple(leaves))


def _cut(value: Any, cut: Callable[[Any], Any], leaves: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return _cut_instance(value, cut)
    if not value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()
    leaves.append(leaf)
    return leaf if value.is_leaf else _Alias.apply(leaf)


def _cut_instance(value: Any, cut: Callable[[Any], Any]) -> Any:
    """A copy of an instance that holds tensors of a graph; anything else as it is."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | torch.nn.Module):
        return value
    held = pytree.tree_leaves(list(attributes.values()))
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in held):
        return value
    twin = copy.copy(value)
    vars(twin).update({name: pytree.tree_map_only(torch.Tensor, cut, one) for name, one in attributes.items()})
    return twin
