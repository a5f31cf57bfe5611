"""Inputs of a step that planning may use: the same memory, detached from the autograd graph of the caller's code.

A model inside a larger model receives tensors that other modules made. Planned steps differentiate these tensors, and
must stop there: a backward pass through the caller's graph would add to gradients and free the tensors that the graph
saved, and no leaf of the caller may receive a gradient.

Known limits: tensors inside objects that pytree does not know, other than plain instances with attributes, are not
detached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_compat.core import pytree

__all__ = ["DetachedInputs", "detached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedInputs:
    """Inputs that are detached from the caller's graph.

    Attributes:
        args: positional inputs.
        kwargs: keyword inputs.
        leaves: the leaves that receive the inputs' gradients, in the order of the inputs.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[torch.Tensor, ...]


class _Alias(torch.autograd.Function):
    """The same tensor, as the result of an op: autograd lets a model overwrite it, like the caller's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def detached(args: Sequence[Any], kwargs: dict[str, Any]) -> DetachedInputs:
    """The inputs, with tensors of a graph replaced by leaves (or results of an op on a leaf) that share their memory.

    A tensor that occurs twice stays one tensor.
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
    """A copy of an instance that holds tensors of a graph; any other value is returned as it is."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type | torch.nn.Module):
        return value
    held = pytree.tree_leaves(list(attributes.values()))
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in held):
        return value
    twin = copy.copy(value)
    vars(twin).update({name: pytree.tree_map_only(torch.Tensor, cut, one) for name, one in attributes.items()})
    return twin
