"""Resizing of images, and its gradient.

With an integer factor, every pixel of the result lies at the same position between the same pixels of the operand,
wherever the tile is, so a tile of the result is the resized tile of the operand. Interpolation between pixels needs one
more pixel at each edge.

Known limits: tiles for nearest and bilinear resizing only; no factors that are not integers, and no aligned corners,
which make positions depend on the size of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import rows
from memfit.ops.op_rule import Axes, OpRule
from memfit.ops.tiling.tile import Tiling, extents_of, starts_of
from memfit.ops.tiling.window import SPACE, Tile, cropped

__all__ = ["RULES"]

_aten = torch.ops.aten


def _resized_tiles(*corners: bool) -> Callable[[fx.Node | Call, int], Tiling | None]:
    """The rule of resizing; `corners` holds False, the argument for aligned corners, if the kernel interpolates.

    Such a kernel needs one more pixel at each edge of a tile, except at the edges of the image.
    """

    def rule(call: fx.Node | Call, axes: int) -> Tiling | None:
        kernel: Any = call.target
        data, _, *settings = cast(tuple[Any, ...], call.args)
        factors, extents = _whole_factors(data.meta["val"], call.meta["val"], corners, settings), extents_of(data, axes)
        if factors is None:
            return None

        def run(data: torch.Tensor, *_: Any, tile: Tile) -> Any:
            sizes = [extent * n for extent, n in zip(data.shape[SPACE:], factors, strict=True)]
            first = [start * n for (start, _), n in zip(needs(tile)[0], factors, strict=False)]
            return cropped(kernel(data, sizes, *corners), first, tile)

        def needs(tile: Tile) -> tuple[Tile, ...]:
            small = tuple((start // n, -(-stop // n)) for (start, stop), n in zip(tile, factors, strict=False))
            return (_beyond(small, extents) if corners else small,)

        return Tiling(extents=extents_of(call, axes), operands=(data,), needs=needs, run=run)

    return rule


def _resized_backward_tiles(*corners: bool) -> Callable[[fx.Node | Call, int], Tiling | None]:
    """The rule of the gradient of resizing; see `_resized_tiles`."""

    def rule(call: fx.Node | Call, axes: int) -> Tiling | None:
        kernel: Any = call.target
        gradient, _, _, *settings = cast(tuple[Any, ...], call.args)
        factors, extents = (
            _whole_factors(call.meta["val"], gradient.meta["val"], corners, settings),
            extents_of(call, axes),
        )
        if factors is None:
            return None

        def run(gradient: torch.Tensor, *_: Any, tile: Tile) -> Any:
            given = gradient.shape[SPACE:]
            sizes = [extent // n for extent, n in zip(given, factors, strict=True)]
            made = kernel(gradient, given, [*gradient.shape[:SPACE], *sizes], *corners)
            return cropped(made, starts_of(reach(tile)), tile)

        def reach(tile: Tile) -> Tile:
            return _beyond(tile, extents) if corners else tile

        def needs(tile: Tile) -> tuple[Tile, ...]:
            return (tuple((start * n, stop * n) for (start, stop), n in zip(reach(tile), factors, strict=False)),)

        return Tiling(extents=extents, operands=(gradient,), needs=needs, run=run)

    return rule


def _whole_factors(
    small: torch.Tensor, large: torch.Tensor, corners: tuple[bool, ...], settings: Sequence[Any]
) -> tuple[int, ...] | None:
    """The integer factors that enlarge both axes of an image; None without them, or if the settings ask for others."""
    sizes = list(zip(small.shape[SPACE:], large.shape[SPACE:], strict=True))
    factors = tuple(after // before for before, after in sizes)
    asked = settings[len(corners) :]
    exact = all(after == before * n for (before, after), n in zip(sizes, factors, strict=True))
    exact = exact and all(f is None or f == n for f, n in zip(asked, factors, strict=False))
    return factors if exact and tuple(settings[: len(corners)]) == corners else None


def _beyond(tile: Tile, extents: Sequence[int]) -> Tile:
    """A tile with one more pixel on each side, as far as the image extends."""
    return tuple(
        (max(0, start - 1), min(extent, stop + 1)) for (start, stop), extent in zip(tile, extents, strict=True)
    )


def _resized_back(call: fx.Node | Call, batch: int) -> Axes | None:
    gradient, target = cast(fx.Node, call.args[0]), cast(Any, call.target)

    def run(gradient: torch.Tensor, sizes: Any, shape: Sequence[int], *rest: Any) -> Any:
        return target(gradient, sizes, [gradient.shape[0], *shape[1:]], *rest)

    return Axes({gradient: 0}, 0, run)


_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_CORNERS: dict[str, tuple[bool, ...]] = {"nearest2d": (), "bilinear2d": (False,)}
"""The kinds of which tiles can be made, with the argument for aligned corners."""


def _forward(kind: str) -> OpRule:
    tile = _resized_tiles(*_CORNERS[kind]) if kind in _CORNERS else None
    return OpRule(batch=rows(0), tile=tile, slices_keep_bits=kind == "nearest2d")


def _backward(kind: str) -> OpRule:
    return OpRule(batch=_resized_back, tile=_resized_backward_tiles(*_CORNERS[kind]) if kind in _CORNERS else None)


RULES = {
    **{getattr(_aten, f"upsample_{kind}").default: _forward(kind) for kind in _KINDS},
    **{getattr(_aten, f"upsample_{kind}_backward").default: _backward(kind) for kind in _KINDS},
}
