"""Rules of ops that can run on a tile of an image; a convolution needs a few more rows and columns than it makes.

Tiles are cut along one or both of the first two axes after batch and channels, the height and width of images. For a
tile of its result, a call needs the part of each operand that its windows cover; it pads at the real border and nowhere
else. The input gradient of a convolution or a pooling is made the same way, from the part of the output gradient whose
windows touch the tile, so that every element is made once and nothing is added up across tiles. The weight gradient is
a sum over tiles of the output gradient.

`tiling_of` says how a call runs on tiles, or that it does not: an op that reads a whole image (global pooling,
flattening, attention) ends a fused region; group and instance normalisation are split
(`memfit.passes.group_norm_split`).

Known limits: resizing by integer factors only, nearest or bilinear without aligned corners; average pooling without
ceil mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import is_alone, nodes_of
from memfit.ir.slicing import Reach
from memfit.ops.batching.rules import is_pointwise, makes_sums_or_slices
from memfit.ops.kernels.batch_norm import input_gradient_from_sums, sums_of_data
from memfit.ops.kernels.convolution import (
    convolution_input_gradient,
    convolution_input_slices,
    input_gradient_beside_stand_in,
    make_metadata_only,
)
from memfit.ops.kernels.group_norm import input_gradient, products_over_space, scaled_and_shifted, sums_of_space
from memfit.ops.recompute import normalise
from memfit.ops.tiling.resize import resized, resized_backward
from memfit.ops.tiling.rule import Tiling, extents_of, starts_of
from memfit.ops.tiling.window import SPACE, Tile, Window, cropped, inside, padded, read_by, touching
from memfit.torch_compat.core import suggest_memory_format

__all__ = ["reaches_of", "tiling_of"]

_aten = torch.ops.aten

_POINTS = 16
"""The reach of a call is measured on bands at about this many positions."""


def tiling_of(call: fx.Node | Call, axes: int) -> Tiling | None:
    """How a call runs on tiles along `axes` axes of space; None if it cannot."""
    rule = _RULES.get(call.target) or (_elementwise if is_pointwise(call) else None)
    found = rule(call, axes) if rule is not None else None
    if found is None:
        return None
    values = [node.meta["val"] for node in found.operands]
    results = call.meta["val"] if isinstance(call.meta["val"], list | tuple) else [call.meta["val"]]
    fits = all(v.dim() >= SPACE + axes and v.shape[0] == values[0].shape[0] for v in values)
    # Results are put together in their own layout, so they must be dense; operands may be any view.
    dense = all(is_alone(result) for result in results if isinstance(result, torch.Tensor))
    return found if fits and dense else None


def reaches_of(tiling: Tiling, place: int) -> tuple[Reach, ...]:
    """The range of an operand that a call reads along each axis, as planners estimate it."""
    found: list[Reach] = []
    shape = tiling.operands[place].meta["val"].shape
    whole = tuple((0, extent) for extent in tiling.extents)
    for axis, extent in enumerate(tiling.extents):
        scale = shape[SPACE + axis] / extent
        before = after = 0.0
        for start in {point * (extent - 1) // _POINTS for point in range(_POINTS + 1)}:
            tile = (*whole[:axis], (start, start + 1), *whole[axis + 1 :])
            first, last = tiling.needs(tile)[place][axis]
            before, after = max(before, start * scale - first), max(after, last - (start + 1) * scale)
        found.append(Reach(scale=scale, before=before, after=after))
    return tuple(found)


def _pointwise(*positions: int) -> Callable[[fx.Node | Call, int], Tiling | None]:
    """The rule of calls that take a tile of some operands for the same tile of the result."""

    def rule(call: fx.Node | Call, axes: int) -> Tiling | None:
        operands = [call.args[p] for p in positions]
        if not all(isinstance(n, fx.Node) for n in operands) or not makes_sums_or_slices(call):
            return None
        return _alike(call, axes, cast(list[fx.Node], operands))

    return rule


def _beside_numbers(count: int) -> Callable[[fx.Node | Call, int], Tiling | None]:
    """The rule of calls that take a tile of their first `count` operands, and one number per channel of the others."""

    def rule(call: fx.Node | Call, axes: int) -> Tiling | None:
        nodes = cast(tuple[fx.Node, ...], tuple(a for a in call.args if isinstance(a, fx.Node)))
        if len({extents_of(node, axes) for node in nodes[:count]}) != 1 or len(set(nodes)) != len(nodes):
            return None
        target: Any = call.target
        one: Tile = ((0, 1),) * axes

        def run(*args: Any, tile: Tile) -> Any:
            return target(*args)

        def needs(tile: Tile) -> tuple[Tile, ...]:
            return (tile,) * count + (one,) * (len(nodes) - count)

        return Tiling(extents=extents_of(nodes[0], axes), operands=nodes, needs=needs, run=run)

    return rule


def _elementwise(call: fx.Node | Call, axes: int) -> Tiling | None:
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
    return _alike(call, axes, operands)


def _concatenation(call: fx.Node | Call, axes: int) -> Tiling | None:
    dimension = cast(int, call.args[1] if len(call.args) > 1 else 0) % call.meta["val"].dim()
    if dimension == 0 or SPACE <= dimension < SPACE + axes:
        return None
    return _alike(call, axes, nodes_of(call.args[0]))


def _alike(call: fx.Node | Call, axes: int, operands: Sequence[fx.Node]) -> Tiling | None:
    target: Any = call.target
    distinct = tuple(dict.fromkeys(operands))
    found = {extents_of(node, axes) for node in distinct}
    if len(found) != 1 or distinct[0].meta["val"].dim() < SPACE + axes:
        return None

    def run(*args: Any, tile: Tile) -> Any:
        return target(*args, **call.kwargs)

    return Tiling(extents=found.pop(), operands=distinct, needs=lambda tile: (tile,) * len(distinct), run=run)


def _convolution(call: fx.Node | Call, axes: int) -> Tiling | None:
    target: Any = call.target
    data, weight = cast(tuple[fx.Node, fx.Node], call.args[:2])
    stride, padding, dilation, transposed, more, groups = cast(tuple[Any, ...], call.args[3:9])
    windows, inner = _windows_of(weight, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
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


def _input_gradient(call: fx.Node | Call, axes: int) -> Tiling:
    target: Any = call.target
    gradient, metadata_only, weight = cast(tuple[fx.Node, ...], call.args[:3])
    sizes, stride, padding, dilation, transposed, more, groups = cast(tuple[Any, ...], call.args[3:10])
    windows, inner = _windows_of(weight, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
    extents, none = extents_of(gradient, axes), [*[0] * axes, *more[axes:]]

    def spread(gradient: torch.Tensor, metadata_only: torch.Tensor, weight: Any, *_: Any, tile: Tile) -> Any:
        reach = read_by(windows, touching(windows, tile, extents))
        like = _metadata_only_tile(metadata_only, gradient.shape[0], reach)
        made = target(gradient, like, weight, sizes, stride, inner, dilation, False, none, groups)
        return cropped(made, starts_of(reach), tile)

    def convolve(gradient: torch.Tensor, metadata_only: torch.Tensor, weight: Any, *_: Any, tile: Tile) -> Any:
        like = _metadata_only_tile(metadata_only, gradient.shape[0], tile)
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


def _input_slices(call: fx.Node | Call, axes: int) -> Tiling | None:
    """The rule of an input gradient that is cut into slices of its channels."""
    *args, cuts = call.args
    whole = _input_gradient(
        Call(name=call.name, target=convolution_input_gradient, args=tuple(args), meta=call.meta), axes
    )

    def run(*args: Any, tile: Tile) -> tuple[torch.Tensor, ...]:
        made = whole.run(*args[:-1], tile=tile)
        return tuple(made[:, start:stop].contiguous() for start, stop in cast(Any, cuts))

    return replace(whole, run=run)


def _weight_gradient(call: fx.Node | Call, axes: int) -> Tiling | None:
    """The rule of weight gradients, sums over tiles of the output gradient, or of the input if transposed."""
    target: Any = call.target
    if not makes_sums_or_slices(call):
        return None
    gradient, data, weight = cast(tuple[fx.Node, ...], call.args[:3])
    sizes, stride, padding, dilation, transposed, more, groups, mask = cast(tuple[Any, ...], call.args[3:11])
    windows, inner = _windows_of(weight, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
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


def _max_pool(call: fx.Node | Call, axes: int) -> Tiling | None:
    target: Any = call.target
    data = cast(fx.Node, call.args[0])
    kernel, stride, padding, dilation, ceil = _pooling(call.args[1:], data, ([], 0, 1, False))
    value, extents = data.meta["val"], extents_of(data, axes)
    space = tuple(value.shape[SPACE:])
    if not value.is_floating_point() or (axes > 1 and len(space) > 2):
        return None
    windows, inner = _windows(kernel, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]

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
    if not makes_sums_or_slices(call):
        return None
    gradient, metadata_only, places = cast(tuple[fx.Node, ...], (call.args[0], call.args[1], call.args[7]))
    kernel, stride, padding, dilation, ceil = _pooling(call.args[2:7], metadata_only, ())
    windows, inner = _windows(kernel, stride, padding, dilation, axes), [*[0] * axes, *padding[axes:]]
    extents, space = extents_of(gradient, axes), tuple(metadata_only.meta["val"].shape[SPACE:])

    def run(gradient: torch.Tensor, metadata_only: torch.Tensor, *rest: Any, tile: Tile) -> Any:
        reach, places = read_by(windows, touching(windows, tile, extents)), rest[-1]
        first = starts_of(reach)
        like = _metadata_only_tile(metadata_only, gradient.shape[0], reach)
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
    kernel, stride, padding, ceil, with_padding, divisor = _pooling(call.args[1:], data, ([], 0, False, True, None))
    windows, inner = _windows(kernel, stride, padding, 1, axes), [*[0] * axes, *padding[axes:]]
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
    if not makes_sums_or_slices(call):
        return None
    gradient, metadata_only = cast(tuple[fx.Node, fx.Node], call.args[:2])
    kernel, stride, padding, ceil, with_padding, divisor = _pooling(call.args[2:], metadata_only, ())
    windows, inner = _windows(kernel, stride, padding, 1, axes), [*[0] * axes, *padding[axes:]]
    extents = extents_of(gradient, axes)
    if ceil or (any(padding[:axes]) and not with_padding):
        return None

    def run(gradient: torch.Tensor, metadata_only: torch.Tensor, *_: Any, tile: Tile) -> Any:
        reach = read_by(windows, touching(windows, tile, extents))
        like = _metadata_only_tile(metadata_only, gradient.shape[0], reach)
        made = target(gradient, like, kernel, stride, inner, ceil, with_padding, divisor)
        return cropped(made, starts_of(reach), tile)

    return Tiling(
        extents=extents_of(metadata_only, axes),
        operands=(gradient,),
        needs=lambda tile: (touching(windows, tile, extents),),
        run=run,
    )


def _windows_of(weight: fx.Node, stride: Any, padding: Any, dilation: Any, axes: int) -> Sequence[Window]:
    return _windows(weight.meta["val"].shape[SPACE:], stride, padding, dilation, axes)


def _windows(kernel: Any, stride: Any, padding: Any, dilation: Any, axes: int) -> Sequence[Window]:
    """Windows along the axes that are cut, from settings that are one number or one number per axis."""
    given = [[v] * axes if isinstance(v, int) else list(v) for v in (kernel, stride, padding, dilation)]
    return tuple(
        Window(size=wide * (size - 1) + 1, stride=step, padding=pad)
        for size, step, pad, wide, _ in zip(*given, range(axes), strict=False)
    )


def _pooling(given: Sequence[Any], data: fx.Node, defaults: Sequence[Any]) -> list[Any]:
    """The settings of a pooling: kernel, stride and padding one per axis, the rest as given."""
    axes = data.meta["val"].dim() - SPACE
    settings = [*given, *defaults[len(given) - 1 :]] if defaults else list(given)
    kernel, stride, padding, *rest = settings
    sizes, pads, steps = (_for_axes(v, axes) for v in (kernel, padding, stride or kernel))
    return [sizes, steps, pads, *rest]


def _for_axes(value: Any, axes: int) -> list[int]:
    return [value] * axes if isinstance(value, int) else list(value) * (axes // len(value))


def _metadata_only_tile(metadata_only: torch.Tensor, samples: int, tile: Tile) -> torch.Tensor:
    """A metadata-only tensor with the size of a tile of `samples` samples, in the layout of the whole."""
    sizes = [stop - start for start, stop in tile]
    shape = (samples, metadata_only.shape[1], *sizes, *metadata_only.shape[SPACE + len(tile) :])
    layout = suggest_memory_format(metadata_only)
    return make_metadata_only(
        torch.empty(shape, dtype=metadata_only.dtype, device="meta", memory_format=layout), metadata_only.device
    )


_RULES: dict[Any, Callable[[fx.Node | Call, int], Tiling | None]] = {
    **dict.fromkeys((_aten.native_batch_norm_backward.default, input_gradient_from_sums), _pointwise(0, 1)),
    **dict.fromkeys((normalise, sums_of_data), _pointwise(0)),
    **dict.fromkeys((sums_of_space, scaled_and_shifted), _beside_numbers(1)),
    **dict.fromkeys((products_over_space, input_gradient), _beside_numbers(2)),
    _aten.cat.default: _concatenation,
    _aten.convolution.default: _convolution,
    convolution_input_gradient: _input_gradient,
    convolution_input_slices: _input_slices,
    input_gradient_beside_stand_in: _input_gradient,
    _aten.convolution_backward.default: _weight_gradient,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.max_pool3d_with_indices.default: _max_pool,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    _aten.avg_pool2d.default: _average_pool,
    _aten.avg_pool3d.default: _average_pool,
    _aten.avg_pool2d_backward.default: _average_pool_backward,
    _aten.upsample_nearest2d.default: resized(),
    _aten.upsample_nearest2d_backward.default: resized_backward(),
    _aten.upsample_bilinear2d.default: resized(False),
    _aten.upsample_bilinear2d_backward.default: resized_backward(False),
}
