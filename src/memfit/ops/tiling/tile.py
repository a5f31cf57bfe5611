"""How a call runs on a tile: the tiles of its operands that it needs, and the function that runs."""

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
        extents: size along each axis that is cut, of its result or of the gradient that it adds up.
        operands: operands of which the call takes a tile.
        needs: for a tile of the call, returns the tile that it needs of each of these operands.
        run: runs the call on its arguments, with these tiles of the operands; `tile`, by name, is the tile of the call.
    """

    extents: tuple[int, ...]
    operands: tuple[fx.Node, ...]
    needs: Callable[[Tile], tuple[Tile, ...]]
    run: Callable[..., Any]


def extents_of(node: fx.Node | Call, axes: int, result: int | None = None) -> tuple[int, ...]:
    """The size of a value along each axis of space that is cut."""
    value = node.meta["val"] if result is None else node.meta["val"][result]
    return tuple(value.shape[SPACE : SPACE + axes])


def starts_of(tile: Tile) -> tuple[int, ...]:
    """The start of a tile along each axis."""
    return tuple(start for start, _ in tile)
