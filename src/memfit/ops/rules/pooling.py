"""Pooling over windows, and its gradient, from the part of the output gradient whose windows touch the tile.

Known limits: average pooling on tiles without ceil mode.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import of_metadata_only, rows, rows_beside_shape
from memfit.ops.op_rule import Fill, OpRule
from memfit.ops.tiling.settings import metadata_only_tile, settings_of, windows_along
from memfit.ops.tiling.tile import Tiling, extents_of, starts_of
from memfit.ops.tiling.window import SPACE, Tile, cropped, inside, padded, read_by, touching

__all__ = ["RULES"]

_aten = torch.ops.aten


def _max_pool(call: fx.Node | Call, axes: int) -> Tiling | None:
    target: Any = call.target
    data = cast(fx.Node, call.args[0])
    kernel, stride, padding, dilation, ceil = settings_of(call.args[1:], data, ([], 0, 1, False))
    value, extents = data.meta["val"], extents_of(data, axes)
    space = tuple(value.shape[SPACE:])
    if not value.is_floating_point() or (axes > 1 and len(space) > 2):
        return None
    windows, inner = windows_along(kernel, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]

    def run(data: torch.Tensor, *_: Any, tile: Tile) -> Any:
        reach = read_by(windows, tile)
        data = padded(data, reach, extents, -math.inf)
        most, places = target(data, kernel, stride, inner, dilation, ceil)
        # Where a whole window is -inf, the index is that of its first element, which may be padding.
        if axes == 1:
            return most, places.add_(reach[0][0] * math.prod(space[1:])).clamp_(min=0)
        rows = places.div(data.shape[-1], rounding_mode="floor")
        columns = places - rows * data.shape[-1]
        rows, columns = (t.add_(start).clamp_(min=0) for t, (start, _) in zip((rows, columns), reach, strict=True))
        return most, rows.mul_(space[1]).add_(columns)

    return Tiling(
        extents=extents_of(call, axes, 0),
        operands=(data,),
        needs=lambda tile: (inside(read_by(windows, tile), extents),),
        run=run,
    )


def _max_pool_backward(call: fx.Node | Call, axes: int) -> Tiling | None:
    target: Any = call.target
    if not of_metadata_only(call):
        return None
    gradient, metadata_only, places = cast(tuple[fx.Node, ...], (call.args[0], call.args[1], call.args[7]))
    kernel, stride, padding, dilation, ceil = settings_of(call.args[2:7], metadata_only, ())
    windows, inner = windows_along(kernel, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
    extents, space = extents_of(gradient, axes), tuple(metadata_only.meta["val"].shape[SPACE:])

    def run(gradient: torch.Tensor, metadata_only: torch.Tensor, *rest: Any, tile: Tile) -> Any:
        reach, places = read_by(windows, touching(windows, tile, extents)), rest[-1]
        first = starts_of(reach)
        like = metadata_only_tile(metadata_only, gradient.shape[0], reach)
        if axes == 1:
            places = places - first[0] * math.prod(space[1:])
        else:
            rows = places.div(space[1], rounding_mode="floor")
            columns = places - rows * space[1]
            places = rows.sub_(first[0]).mul_(like.shape[-1]).add_(columns.sub_(first[1]))
        return cropped(target(gradient, like, kernel, stride, inner, dilation, ceil, places), first, tile)

    return Tiling(
        extents=extents_of(metadata_only, axes),
        operands=(gradient, places),
        needs=lambda tile: (touching(windows, tile, extents),) * 2,
        run=run,
    )


def _average_pool(call: fx.Node | Call, axes: int) -> Tiling | None:
    target: Any = call.target
    data = cast(fx.Node, call.args[0])
    kernel, stride, padding, ceil, with_padding, divisor = settings_of(call.args[1:], data, ([], 0, False, True, None))
    windows, inner = windows_along(kernel, stride, padding, 1, axes), [*[0] * axes, *padding[axes:]]
    extents = extents_of(data, axes)
    if ceil or (any(padding[:axes]) and not with_padding):
        return None

    def run(data: torch.Tensor, *_: Any, tile: Tile) -> Any:
        data = padded(data, read_by(windows, tile), extents)
        return target(data, kernel, stride, inner, ceil, with_padding, divisor)

    return Tiling(
        extents=extents_of(call, axes),
        operands=(data,),
        needs=lambda tile: (inside(read_by(windows, tile), extents),),
        run=run,
    )


def _average_pool_backward(call: fx.Node | Call, axes: int) -> Tiling | None:
    target: Any = call.target
    if not of_metadata_only(call):
        return None
    gradient, metadata_only = cast(tuple[fx.Node, fx.Node], call.args[:2])
    kernel, stride, padding, ceil, with_padding, divisor = settings_of(call.args[2:], metadata_only, ())
    windows, inner = windows_along(kernel, stride, padding, 1, axes), [*[0] * axes, *padding[axes:]]
    extents = extents_of(gradient, axes)
    if ceil or (any(padding[:axes]) and not with_padding):
        return None

    def run(gradient: torch.Tensor, metadata_only: torch.Tensor, *_: Any, tile: Tile) -> Any:
        reach = read_by(windows, touching(windows, tile, extents))
        like = metadata_only_tile(metadata_only, gradient.shape[0], reach)
        made = target(gradient, like, kernel, stride, inner, ceil, with_padding, divisor)
        return cropped(made, starts_of(reach), tile)

    return Tiling(
        extents=extents_of(metadata_only, axes),
        operands=(gradient,),
        needs=lambda tile: (touching(windows, tile, extents),),
        run=run,
    )


def _places_of_maxima(places: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Fills in the places of maxima, each in its own window, as in the result of a pooling."""
    _, pooled, *settings, _ = args
    data = torch.randn(pooled.shape, dtype=pooled.dtype, device=pooled.device)
    places.copy_(_aten.max_pool2d_with_indices.default(data, *settings)[1])


RULES = {
    _aten.max_pool2d_with_indices.default: OpRule(
        batch=rows(0),
        tile=_max_pool,
        slices_keep_bits=True,
        tile_calls={1: ("add",), 2: ("div", "mul", "sub", "add", "add", "mul", "add")},
    ),
    _aten.max_pool3d_with_indices.default: OpRule(batch=rows(0), tile=_max_pool, slices_keep_bits=True),
    _aten.max_pool2d_with_indices_backward.default: OpRule(
        batch=rows_beside_shape(0, 7),
        tile=_max_pool_backward,
        shape_only=(1,),
        fill=Fill(operand=7, fill=_places_of_maxima),
        tile_calls={1: ("sub",), 2: ("div", "mul", "sub", "sub", "mul", "sub", "add")},
    ),
    _aten.avg_pool2d.default: OpRule(batch=rows(0), tile=_average_pool, slices_keep_bits=True),
    _aten.avg_pool3d.default: OpRule(batch=rows(0), tile=_average_pool, slices_keep_bits=True),
    _aten.avg_pool2d_backward.default: OpRule(batch=rows_beside_shape(0), tile=_average_pool_backward, shape_only=(1,)),
    _aten._adaptive_avg_pool2d.default: OpRule(batch=rows(0), slices_keep_bits=True),
    _aten._adaptive_avg_pool2d_backward.default: OpRule(batch=rows_beside_shape(0), shape_only=(1,)),
}
