"""How the call of a module is turned into graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from memfit.capture.unplanned_parts import NOTHING_PLAIN, PlainParts
from memfit.capture.values.decisions import Decision

__all__ = ["Backend", "CallSettings"]

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""Takes a graph and examples of its operands, and returns the function that runs in place of the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """How the call of a module is turned into graphs.

    Attributes:
        fullgraph: whether a call that is more than one graph is an error.
        in_subgraphs: whether graph breaks are expected.
        plain: parts that stay plain code.
        replaced: whether the model's own checkpoints only call their functions.
        decisions: branches on inputs that the call is compiled for are added here; None lets them break the graph.
        as_compiled: whether code that asks if it is compiled is told so.
        varying: by place of an input among the leaves of the call's arguments, the dimensions whose sizes are symbols
            in the graph, so that it is made for many sizes.
    """

    fullgraph: bool = False
    in_subgraphs: bool = False
    plain: PlainParts = NOTHING_PLAIN
    replaced: bool = False
    decisions: list[Decision] | None = None
    as_compiled: bool = False
    varying: Mapping[int, Sequence[int]] = field(default_factory=dict)
