"""Gradients of weights that autocast casts once.

Eager autocast casts a weight once and keeps the result until the outermost region ends. So where a weight is used
several times (tied layers, a layer in a loop), its gradients are added up in half precision and their sum is cast back
once. A trace has no such cache: each use has its own cast, and the gradients are cast one by one and added in float32,
with different bits. memfit rewrites these sums in the joint graph as eager autocast makes them: gradients in half
precision are added to each other in their order, and the cast of the sum takes the place of the last cast.

Known limits: where the graph breaks, a weight that is cast in several subgraphs is cast in each of them, and in a model
that opens several regions itself, in each region; a cast in the user's code is treated as one of autocast's. The
proof compares the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.amp import autocast_mode

__all__ = ["cast_once"]


def cast_once(gm: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """Returns the places, among the inputs of a Dynamo graph, of the weights that eager autocast casts once."""
    regions = _outermost_regions(gm.graph)
    around = any(
        torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        for kind in {t.device.type for t in inputs if isinstance(t, torch.Tensor)}
    )
    if not torch.is_autocast_cache_enabled() or (regions != 1 and not around):
        return frozenset()
    return frozenset(
        place
        for place, value in enumerate(inputs)
        if isinstance(value, nn.Parameter) and value.requires_grad and value.dtype is torch.float32
    )


def _outermost_regions(graph: fx.Graph) -> int:
    """How many autocast regions a graph opens outside of other regions."""
    depth = regions = 0
    for node in graph.nodes:
        if node.target is autocast_mode._enter_autocast:
            regions += depth == 0
            depth += 1
        elif node.target is autocast_mode._exit_autocast:
            depth -= 1
    return regions
