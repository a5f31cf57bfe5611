"""A call that is not in a graph yet, with the properties of a graph node that other code reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

__all__ = ["Call"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A call that is not in a graph yet, with the properties of a graph node; like a node, it equals only itself.

    Attributes:
        name: name of the node that the call stands for.
        target: function or operator that is called.
        args: positional arguments, nodes among them.
        kwargs: keyword arguments; none by default.
        meta: metadata; `val` is the result of the call.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any]

    @property
    def all_input_nodes(self) -> list[fx.Node]:
        """The operands of the call."""
        found: dict[fx.Node, None] = {}
        fx.map_arg(self.args, lambda node: found.setdefault(node))
        return list(found)
