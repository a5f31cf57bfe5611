"""How a call runs on a tile: what it needs of its operands, and what is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from memfit.fxir.call import Call
from memfit.ops.tiling.window import SPACE, Tile

__all__ = ["Tiling", "extents_of", "starts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a call runs on a tile.

    Attributes:
        extents: along each axis that is cut, of its result or of the gradient it adds up.
        operands: those of which it takes a tile.
        needs: which tile of each of these, for a tile of its own.
        run: the call on its arguments, with these tiles of the operands, and its own `tile` by name.
    """

    extents: tuple[int, ...]
    operands: tuple[fx.Node, ...]
    needs: Callable[[Tile], tuple[Tile, ...]]
    run: Callable[..., Any]


def extents_of(node: fx.Node | Call, axes: int, result: int | None = None) -> tuple[int, ...]:
    """How large something is along each axis of space that is cut."""
    value = node.meta["val"] if result is None else node.meta["val"][result]
    return tuple(value.shape[SPACE : SPACE + axes])


def starts_of(tile: Tile) -> tuple[int, ...]:
    """Where a tile starts along each axis."""
    return tuple(start for start, _ in tile)
