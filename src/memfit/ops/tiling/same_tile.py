"""Rules of calls that make a tile of their result from the same tile of their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import nodes_of
from memfit.ops.kernels.library import direct
from memfit.ops.tiling.tile import Tiling, extents_of
from memfit.ops.tiling.window import SPACE, Tile

__all__ = ["elementwise", "same_tile", "same_tile_beside_numbers", "same_tile_of"]


def same_tile(
    *positions: int, when: Callable[[fx.Node | Call], bool] | None = None
) -> Callable[[fx.Node | Call, int], Tiling | None]:
    """The rule of calls that take a tile of the operands at `positions` for the same tile of the result.

    Args:
        positions: positions of these operands.
        when: whether a call does so; otherwise it runs whole.
    """

    def rule(call: fx.Node | Call, axes: int) -> Tiling | None:
        operands = [call.args[p] for p in positions]
        if not all(isinstance(n, fx.Node) for n in operands) or (when is not None and not when(call)):
            return None
        return same_tile_of(call, axes, cast(list[fx.Node], operands))

    return rule


def same_tile_beside_numbers(count: int) -> Callable[[fx.Node | Call, int], Tiling | None]:
    """The rule of calls that take a tile of their first `count` operands, and one number per channel of the others."""

    def rule(call: fx.Node | Call, axes: int) -> Tiling | None:
        nodes = cast(tuple[fx.Node, ...], tuple(a for a in call.args if isinstance(a, fx.Node)))
        if len({extents_of(node, axes) for node in nodes[:count]}) != 1 or len(set(nodes)) != len(nodes):
            return None
        kernel = direct(call.target)
        one: Tile = ((0, 1),) * axes

        def run(*args: Any, tile: Tile) -> Any:
            return kernel(*args)

        def needs(tile: Tile) -> tuple[Tile, ...]:
            return (tile,) * count + (one,) * (len(nodes) - count)

        return Tiling(extents=extents_of(nodes[0], axes), operands=nodes, needs=needs, run=run)

    return rule


def elementwise(call: fx.Node | Call, axes: int) -> Tiling | None:
    """The rule of pointwise calls, whose operands may be broadcast along axes that are not cut."""
    shape = tuple(call.meta["val"].shape)
    cut = (0, *range(SPACE, SPACE + axes))
    if nodes_of(call.kwargs) or len(shape) < SPACE + axes:
        return None
    operands, fixed = list[fx.Node](), list[fx.Node]()
    for node in nodes_of(call.args):
        theirs = tuple(node.meta["val"].shape)
        alike = len(theirs) == len(shape) and all(theirs[axis] == shape[axis] for axis in cut)
        (operands if alike else fixed).append(node)
    for node in fixed:  # the same for all tiles and samples
        theirs = (1,) * (len(shape) - node.meta["val"].dim()) + tuple(node.meta["val"].shape)
        if any(theirs[axis] != 1 for axis in cut):
            return None
    return same_tile_of(call, axes, operands)


def same_tile_of(call: fx.Node | Call, axes: int, operands: Sequence[fx.Node]) -> Tiling | None:
    """How a call runs on tiles for which it takes the same tile of `operands`."""
    kernel = direct(call.target)
    distinct = tuple(dict.fromkeys(operands))
    found = {extents_of(node, axes) for node in distinct}
    if len(found) != 1 or distinct[0].meta["val"].dim() < SPACE + axes:
        return None

    def run(*args: Any, tile: Tile) -> Any:
        return kernel(*args, **call.kwargs)

    return Tiling(extents=found.pop(), operands=distinct, needs=lambda tile: (tile,) * len(distinct), run=run)
