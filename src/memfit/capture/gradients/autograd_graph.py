"""Queries of the graph that autograd builds behind tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["edges_behind", "leaves_behind", "nodes_behind"]


def nodes_behind(values: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph behind some tensors, each once; other values have none."""
    waiting: list[Any] = [value.grad_fn for value in values if isinstance(value, torch.Tensor)]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


def edges_behind(values: Iterable[Any]) -> set[tuple[Any, int]]:
    """The node results to which a gradient of some tensors may flow: each a node and the index of its result."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    found = {(value.grad_fn, value.output_nr) for value in tensors}
    for node in nodes_behind(tensors):
        found.update(node.next_functions)
    return found


def leaves_behind(values: Iterable[Any]) -> frozenset[int]:
    """Ids of the leaves that tensors were computed from, mostly parameters; a tensor that is a leaf is left out."""
    leaves = (getattr(node, "variable", None) for node in nodes_behind(values))
    return frozenset(id(leaf) for leaf in leaves if leaf is not None)
