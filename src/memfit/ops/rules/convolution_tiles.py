"""Convolutions and their gradients on tiles of an image.

The input gradient is made from the part of the output gradient whose windows touch the tile; the weight gradient is a
sum over tiles of the output gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.kernels.convolution import convolution_input_gradient
from memfit.ops.tiling.settings import metadata_only_tile, windows_of
from memfit.ops.tiling.tile import Tiling, extents_of, starts_of
from memfit.ops.tiling.window import Tile, cropped, inside, padded, read_by, touching

__all__ = [
    "convolution_tiles",
    "input_gradient_tiles",
    "input_slices_tiles",
    "makes_weight_gradient_only",
    "weight_gradient_tiles",
]


def convolution_tiles(call: fx.Node | Call, axes: int) -> Tiling | None:
    """The rule of a convolution, transposed or not."""
    target: Any = call.target
    data, weight = cast(tuple[fx.Node, fx.Node], call.args[:2])
    stride, padding, dilation, transposed, more, groups = cast(tuple[Any, ...], call.args[3:9])
    windows, inner = windows_of(weight, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
    extents, none = extents_of(data, axes), [*[0] * axes, *more[axes:]]

    def convolve(data: torch.Tensor, weight: Any, bias: Any, *_: Any, tile: Tile) -> Any:
        data = padded(data, read_by(windows, tile), extents)
        return target(data, weight, bias, stride, inner, dilation, False, more, groups)

    def spread(data: torch.Tensor, weight: Any, bias: Any, *_: Any, tile: Tile) -> Any:
        first = starts_of(read_by(windows, touching(windows, tile, extents)))
        return cropped(target(data, weight, bias, stride, inner, dilation, True, none, groups), first, tile, bias)

    def needs(tile: Tile) -> tuple[Tile, ...]:
        return (touching(windows, tile, extents) if transposed else inside(read_by(windows, tile), extents),)

    return Tiling(extents=extents_of(call, axes), operands=(data,), needs=needs, run=spread if transposed else convolve)


def input_gradient_tiles(call: fx.Node | Call, axes: int) -> Tiling:
    """The rule of an input gradient: a transposed convolution of the output gradient."""
    target: Any = call.target
    gradient, metadata_only, weight = cast(tuple[fx.Node, ...], call.args[:3])
    sizes, stride, padding, dilation, transposed, more, groups = cast(tuple[Any, ...], call.args[3:10])
    windows, inner = windows_of(weight, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
    extents, none = extents_of(gradient, axes), [*[0] * axes, *more[axes:]]

    def spread(gradient: torch.Tensor, metadata_only: torch.Tensor, weight: Any, *_: Any, tile: Tile) -> Any:
        reach = read_by(windows, touching(windows, tile, extents))
        like = metadata_only_tile(metadata_only, gradient.shape[0], reach)
        made = target(gradient, like, weight, sizes, stride, inner, dilation, False, none, groups)
        return cropped(made, starts_of(reach), tile)

    def convolve(gradient: torch.Tensor, metadata_only: torch.Tensor, weight: Any, *_: Any, tile: Tile) -> Any:
        like = metadata_only_tile(metadata_only, gradient.shape[0], tile)
        gradient = padded(gradient, read_by(windows, tile), extents)
        return target(gradient, like, weight, sizes, stride, inner, dilation, True, none, groups)

    def needs(tile: Tile) -> tuple[Tile, ...]:
        return (inside(read_by(windows, tile), extents) if transposed else touching(windows, tile, extents),)

    return Tiling(
        extents=extents_of(metadata_only, axes),
        operands=(gradient,),
        needs=needs,
        run=convolve if transposed else spread,
    )


def input_slices_tiles(call: fx.Node | Call, axes: int) -> Tiling | None:
    """The rule of an input gradient that is cut into slices of its channels."""
    *args, cuts = call.args
    whole = input_gradient_tiles(
        Call(name=call.name, target=convolution_input_gradient, args=tuple(args), meta=call.meta), axes
    )

    def run(*args: Any, tile: Tile) -> tuple[torch.Tensor, ...]:
        made = whole.run(*args[:-1], tile=tile)
        return tuple(made[:, start:stop].contiguous() for start, stop in cast(Any, cuts))

    return replace(whole, run=run)


def weight_gradient_tiles(call: fx.Node | Call, axes: int) -> Tiling | None:
    """The rule of weight gradients, sums over tiles of the output gradient, or of the input if transposed."""
    target: Any = call.target
    if not makes_weight_gradient_only(call):
        return None
    gradient, data, weight = cast(tuple[fx.Node, ...], call.args[:3])
    sizes, stride, padding, dilation, transposed, more, groups, mask = cast(tuple[Any, ...], call.args[3:11])
    windows, inner = windows_of(weight, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
    small, large = (data, gradient) if transposed else (gradient, data)
    cut, extents, none = extents_of(small, axes), extents_of(large, axes), [*[0] * axes, *more[axes:]]
    apart = all(
        (window.size, window.padding, extent) == (window.stride, 0, count * window.stride)
        for window, count, extent in zip(windows, cut, extents, strict=True)
    )
    if transposed and mask[2] and not apart:
        return None  # where windows overlap, the gradient would count twice for the bias

    def run(gradient: torch.Tensor, data: torch.Tensor, weight: Any, *_: Any, tile: Tile) -> Any:
        reach = read_by(windows, tile)
        if transposed:
            gradient = padded(gradient, reach, extents)
        else:
            data = padded(data, reach, extents)
        return target(gradient, data, weight, sizes, stride, inner, dilation, transposed, none, groups, mask)

    return Tiling(
        extents=cut,
        operands=(small, large),
        needs=lambda tile: (tile, inside(read_by(windows, tile), extents)),
        run=run,
    )


def makes_weight_gradient_only(call: fx.Node | Call) -> bool:
    """Whether a call of `convolution_backward` makes no input gradient: a kernel for both gradients mixes samples."""
    return not cast(Sequence[bool], call.args[-1])[0]
