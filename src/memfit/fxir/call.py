"""A call that is in no graph yet, with what one asks of a node of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

__all__ = ["Call"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A call that is in no graph yet, with what one asks of a node of a graph; like a node it equals itself only.

    Attributes:
        name: of the node it stands for.
        target: what is called.
        args: its arguments, nodes among them.
        kwargs: none.
        meta: `val` is its result.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any]

    @property
    def all_input_nodes(self) -> list[fx.Node]:
        """Its operands."""
        found: dict[fx.Node, None] = {}
        fx.map_arg(self.args, lambda node: found.setdefault(node))
        return list(found)
