"""Which ops can run on a band of rows, and how: the convolution of an image needs a few rows more than it makes.

Rows are those along the first axis after batch and channels. For a band of its rows a call needs some rows of each of
its operands, those of its window; at the real border it pads, and nowhere else. The gradient of a convolution's or a
pooling's input is made the same way, from the rows of the gradient whose windows touch the band, so that every row is
made once and nothing is added up across bands. The gradient of a weight is a sum over bands of its gradient's rows.

`rows_of` says how a call runs so, or that it does not: what looks at all rows (global pooling, normalisation by group
or instance, flattening, attention) ends a run.

Window arithmetic: Dumoulin & Visin, "A guide to convolution arithmetic for deep learning" (2016).

Known limits: height only, not width; nearest-neighbour resizing by whole factors, and no other resizing; ceil mode of
max pooling only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from memfit.capture.again import Call, normalise
from memfit.capture.batch_norm import input_gradient_from_sums, sums_of_data
from memfit.capture.by_samples import ELEMENT_BY_ELEMENT, makes_sums_or_slices, nodes_of, owns_memory
from memfit.capture.rewrite import convolution_input_gradient, input_gradient_beside_stand_in, make_hollow
from memfit.step.graph import Reach

__all__ = ["AXIS", "Range", "Rows", "bands_of", "reach_of", "rows_of"]

_aten = torch.ops.aten

AXIS = 2
"""Of the rows."""

_POINTS = 16
"""Bands at so many places are looked at to find how far a call reaches."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How a call runs on a band of rows.

    Attributes:
        rows: how many there are: of its result, or of the gradient it adds up.
        operands: those of which it takes rows.
        needs: which rows of each of these, for rows from the one to before the other.
        run: the call on its arguments, with these rows of the operands, and `start` and `stop` by name.
    """

    rows: int
    operands: tuple[fx.Node, ...]
    needs: Callable[[int, int], tuple[Range, ...]]
    run: Callable[..., Any]


def rows_of(call: fx.Node | Call) -> Rows | None:
    """How a call runs on a band of rows; None if it cannot."""
    rule = _RULES.get(call.target)
    found = rule(call) if rule is not None else None
    if found is None or not found.operands:
        return None
    batch = found.operands[0].meta["val"].shape[0]
    for node in found.operands:
        value = node.meta["val"]
        if value.dim() <= AXIS or value.shape[0] != batch or not owns_memory(node):
            return None
    return found


def bands_of(rows: int, bands: int) -> list[Range]:
    """The bands into which rows are cut."""
    return [(band * rows // bands, (band + 1) * rows // bands) for band in range(bands)]


def reach_of(rows: Rows, place: int) -> Reach:
    """Which rows of an operand a call reads, as planners reckon with it."""
    extent = rows.operands[place].meta["val"].shape[AXIS]
    scale = extent / rows.rows
    before = after = 0.0
    for start in {point * (rows.rows - 1) // _POINTS for point in range(_POINTS + 1)}:
        first, last = rows.needs(start, start + 1)[place]
        before, after = max(before, start * scale - first), max(after, last - (start + 1) * scale)
    return Reach(scale=scale, before=before, after=after)


@dataclass(frozen=True, slots=True)
class _Window:
    """Of a convolution or a pooling, along the rows."""

    size: int
    stride: int
    padding: int

    def read(self, start: int, stop: int) -> Range:
        """The rows that the windows from `start` to before `stop` cover; the border's padding counts as rows."""
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.size

    def touching(self, start: int, stop: int, windows: int) -> Range:
        """The windows that cover any row from `start` to before `stop`, at least one."""
        first = -((self.size - 1 - start - self.padding) // self.stride)
        return _clipped((first, (stop - 1 + self.padding) // self.stride + 1), windows)


def _clipped(rows: Range, extent: int) -> Range:
    """What there is of some rows, at least one."""
    start = min(max(rows[0], 0), extent - 1)
    return start, max(start + 1, min(rows[1], extent))


def _padded(tensor: torch.Tensor, rows: Range, extent: int, value: float = 0.0) -> torch.Tensor:
    """The rows, given those of them there are (`_clipped`), with padding beyond the border."""
    above, below = max(0, -rows[0]), max(0, rows[1] - extent)
    if not above and not below:
        return tensor
    padded = _aten.constant_pad_nd.default(tensor, [*(0, 0) * (tensor.dim() - AXIS - 1), above, below], value)
    wanted = rows[1] - rows[0]
    return cast(torch.Tensor, padded.narrow(AXIS, 0 if above else padded.shape[AXIS] - wanted, wanted))


def _cropped(made: torch.Tensor, first: int, start: int, stop: int, fill: torch.Tensor | None = None) -> torch.Tensor:
    """Rows from `start` to before `stop` of those from `first` on; those that were not made are zero, or `fill`."""
    low, high = max(start, first), min(stop, first + made.shape[AXIS])
    if (low, high) == (start, stop):
        return made.narrow(AXIS, start - first, stop - start)
    shape = (*made.shape[:AXIS], stop - start, *made.shape[AXIS + 1 :])
    whole = made.new_zeros(shape)
    if fill is not None:
        whole.copy_(fill.view(1, -1, *(1,) * (made.dim() - 2)))
    if low < high:
        whole.narrow(AXIS, low - start, high - low).copy_(made.narrow(AXIS, low - first, high - low))
    return whole


def _pointwise(*positions: int) -> Callable[[fx.Node | Call], Rows | None]:
    """The rule of calls that take a band of some operands for the same band of the result."""

    def rule(call: fx.Node | Call) -> Rows | None:
        operands = [call.args[p] for p in positions]
        if not all(isinstance(n, fx.Node) for n in operands) or not makes_sums_or_slices(call):
            return None
        return _same_rows(call, cast(list[fx.Node], operands))

    return rule


def _elementwise(call: fx.Node | Call) -> Rows | None:
    if call.kwargs:
        return None  # `alpha` multiplies as well
    shape = call.meta["val"].shape
    operands, fixed = list[fx.Node](), list[fx.Node]()
    for node in nodes_of(call.args):
        alike = (
            node.meta["val"].dim() == len(shape)
            and node.meta["val"].shape[: AXIS + 1 : AXIS] == shape[: AXIS + 1 : AXIS]
        )
        (operands if alike else fixed).append(node)
    for node in fixed:  # the same for all rows and samples
        beside = (1,) * (len(shape) - node.meta["val"].dim()) + tuple(node.meta["val"].shape)
        if len(beside) > AXIS and (beside[0], beside[AXIS]) != (1, 1):
            return None
    return _same_rows(call, operands)


def _concatenation(call: fx.Node | Call) -> Rows | None:
    dimension = cast(int, call.args[1] if len(call.args) > 1 else 0) % call.meta["val"].dim()
    return None if dimension in (0, AXIS) else _same_rows(call, nodes_of(call.args[0]))


def _same_rows(call: fx.Node | Call, operands: Sequence[fx.Node]) -> Rows | None:
    target: Any = call.target
    values = [n.meta["val"] for n in operands]
    if not operands or any(v.dim() <= AXIS or v.shape[AXIS] != values[0].shape[AXIS] for v in values):
        return None
    distinct = tuple(dict.fromkeys(operands))

    def run(*args: Any, start: int, stop: int) -> Any:
        return target(*args, **call.kwargs)

    return Rows(
        rows=values[0].shape[AXIS],
        operands=distinct,
        needs=lambda start, stop: ((start, stop),) * len(distinct),
        run=run,
    )


def _convolution(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    data, weight = cast(tuple[fx.Node, fx.Node], call.args[:2])
    stride, padding, dilation, transposed, more, groups = cast(tuple[Any, ...], call.args[3:9])
    window = _window_of(weight, stride, padding, dilation)
    extent, rows = data.meta["val"].shape[AXIS], call.meta["val"].shape[AXIS]
    inner = [0, *padding[1:]]

    def convolve(data: torch.Tensor, weight: Any, bias: Any, *_: Any, start: int, stop: int) -> torch.Tensor:
        data = _padded(data, window.read(start, stop), extent)
        return cast(torch.Tensor, target(data, weight, bias, stride, inner, dilation, False, more, groups))

    def spread(data: torch.Tensor, weight: Any, bias: Any, *_: Any, start: int, stop: int) -> torch.Tensor:
        first = window.read(window.touching(start, stop, extent)[0], 0)[0]
        made = target(data, weight, bias, stride, inner, dilation, True, [0, *more[1:]], groups)
        return _cropped(made, first, start, stop, bias)

    def needs(start: int, stop: int) -> tuple[Range, ...]:
        if transposed:
            return (window.touching(start, stop, extent),)
        return (_clipped(window.read(start, stop), extent),)

    return Rows(rows=rows, operands=(data,), needs=needs, run=spread if transposed else convolve)


def _input_gradient(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    gradient, hollow, weight = cast(tuple[fx.Node, ...], call.args[:3])
    sizes, stride, padding, dilation, transposed, more, groups = cast(tuple[Any, ...], call.args[3:10])
    window = _window_of(weight, stride, padding, dilation)
    extent = gradient.meta["val"].shape[AXIS]
    inner, none = [0, *padding[1:]], [0, *more[1:]]

    def spread(gradient: torch.Tensor, hollow: torch.Tensor, weight: Any, *_: Any, start: int, stop: int) -> Any:
        first, last = window.read(*window.touching(start, stop, extent))
        like = _hollow_rows(hollow, gradient.shape[0], last - first)
        made = target(gradient, like, weight, sizes, stride, inner, dilation, False, none, groups)
        return _cropped(made, first, start, stop)

    def convolve(gradient: torch.Tensor, hollow: torch.Tensor, weight: Any, *_: Any, start: int, stop: int) -> Any:
        like = _hollow_rows(hollow, gradient.shape[0], stop - start)
        gradient = _padded(gradient, window.read(start, stop), extent)
        return target(gradient, like, weight, sizes, stride, inner, dilation, True, none, groups)

    def needs(start: int, stop: int) -> tuple[Range, ...]:
        if transposed:
            return (_clipped(window.read(start, stop), extent),)
        return (window.touching(start, stop, extent),)

    rows = hollow.meta["val"].shape[AXIS]
    return Rows(rows=rows, operands=(gradient,), needs=needs, run=convolve if transposed else spread)


def _weight_gradient(call: fx.Node | Call) -> Rows | None:
    """Of a convolution the rows of its result are added up, of a transposed one those of its operand."""
    target: Any = call.target
    if not makes_sums_or_slices(call):
        return None
    gradient, data, weight = cast(tuple[fx.Node, ...], call.args[:3])
    sizes, stride, padding, dilation, transposed, more, groups, mask = cast(tuple[Any, ...], call.args[3:11])
    window = _window_of(weight, stride, padding, dilation)
    small, large = (data, gradient) if transposed else (gradient, data)
    rows, extent = (n.meta["val"].shape[AXIS] for n in (small, large))
    if transposed and mask[2] and (window.size, window.padding, extent) != (window.stride, 0, rows * window.stride):
        return None  # rows of the gradient count twice for the bias where windows overlap
    inner = [0, *padding[1:]]

    def run(gradient: torch.Tensor, data: torch.Tensor, weight: Any, *_: Any, start: int, stop: int) -> Any:
        reach = window.read(start, stop)
        if transposed:
            gradient = _padded(gradient, reach, extent)
        else:
            data = _padded(data, reach, extent)
        none = [0, *more[1:]]
        return target(gradient, data, weight, sizes, stride, inner, dilation, transposed, none, groups, mask)

    def needs(start: int, stop: int) -> tuple[Range, ...]:
        return (start, stop), _clipped(window.read(start, stop), extent)

    return Rows(rows=rows, operands=(small, large), needs=needs, run=run)


def _max_pool(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    data = cast(fx.Node, call.args[0])
    kernel, stride, padding, dilation, ceil = _pooling(call.args[1:], data, ([], 0, 1, False))
    value = data.meta["val"]
    window = _window(kernel, stride, padding, dilation)
    if not value.is_floating_point():
        return None
    plane = math.prod(value.shape[AXIS + 1 :])

    def run(data: torch.Tensor, *_: Any, start: int, stop: int) -> Any:
        reach = window.read(start, stop)
        data = _padded(data, reach, value.shape[AXIS], -math.inf)
        most, places = target(data, kernel, stride, [0, *padding[1:]], dilation, ceil)
        # Where all of a window is -inf, the place is its first one, which may be padding.
        return most, places.add_(reach[0] * plane).clamp_(min=0)

    return Rows(
        rows=call.meta["val"][0].shape[AXIS],
        operands=(data,),
        needs=lambda start, stop: (_clipped(window.read(start, stop), value.shape[AXIS]),),
        run=run,
    )


def _max_pool_backward(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    if not makes_sums_or_slices(call):
        return None
    gradient, hollow, places = cast(tuple[fx.Node, ...], (call.args[0], call.args[1], call.args[7]))
    value = hollow.meta["val"]
    kernel, stride, padding, dilation, ceil = _pooling(call.args[2:7], hollow, ())
    window = _window(kernel, stride, padding, dilation)
    windows, plane = gradient.meta["val"].shape[AXIS], math.prod(value.shape[AXIS + 1 :])

    def run(gradient: torch.Tensor, hollow: torch.Tensor, *rest: Any, start: int, stop: int) -> Any:
        first, last = window.read(*window.touching(start, stop, windows))
        like = _hollow_rows(hollow, gradient.shape[0], last - first)
        places = rest[-1] - first * plane
        made = target(gradient, like, kernel, stride, [0, *padding[1:]], dilation, ceil, places)
        return _cropped(made, first, start, stop)

    def needs(start: int, stop: int) -> tuple[Range, ...]:
        return (window.touching(start, stop, windows),) * 2

    return Rows(rows=value.shape[AXIS], operands=(gradient, places), needs=needs, run=run)


def _average_pool(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    data = cast(fx.Node, call.args[0])
    kernel, stride, padding, ceil, with_padding, divisor = _pooling(call.args[1:], data, ([], 0, False, True, None))
    extent = data.meta["val"].shape[AXIS]
    window = _window(kernel, stride, padding, 1)
    if ceil or (padding[0] and not with_padding):
        return None

    def run(data: torch.Tensor, *_: Any, start: int, stop: int) -> Any:
        data = _padded(data, window.read(start, stop), extent)
        return target(data, kernel, stride, [0, *padding[1:]], ceil, with_padding, divisor)

    return Rows(
        rows=call.meta["val"].shape[AXIS],
        operands=(data,),
        needs=lambda start, stop: (_clipped(window.read(start, stop), extent),),
        run=run,
    )


def _average_pool_backward(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    if not makes_sums_or_slices(call):
        return None
    gradient, hollow = cast(tuple[fx.Node, fx.Node], call.args[:2])
    kernel, stride, padding, ceil, with_padding, divisor = _pooling(call.args[2:], hollow, ())
    window = _window(kernel, stride, padding, 1)
    windows = gradient.meta["val"].shape[AXIS]
    if ceil or (padding[0] and not with_padding):
        return None

    def run(gradient: torch.Tensor, hollow: torch.Tensor, *_: Any, start: int, stop: int) -> Any:
        first, last = window.read(*window.touching(start, stop, windows))
        like = _hollow_rows(hollow, gradient.shape[0], last - first)
        made = target(gradient, like, kernel, stride, [0, *padding[1:]], ceil, with_padding, divisor)
        return _cropped(made, first, start, stop)

    return Rows(
        rows=hollow.meta["val"].shape[AXIS],
        operands=(gradient,),
        needs=lambda start, stop: (window.touching(start, stop, windows),),
        run=run,
    )


def _nearest(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    data = cast(fx.Node, call.args[0])
    small, large = data.meta["val"].shape, call.meta["val"].shape
    times = large[AXIS] // small[AXIS]
    if times * small[AXIS] != large[AXIS] or large[AXIS + 1] % small[AXIS + 1]:
        return None

    def run(data: torch.Tensor, *_: Any, start: int, stop: int) -> Any:
        made = target(data, [data.shape[AXIS] * times, *large[AXIS + 1 :]], None)
        return _cropped(made, start // times * times, start, stop)

    return Rows(
        rows=large[AXIS], operands=(data,), needs=lambda start, stop: ((start // times, -(-stop // times)),), run=run
    )


def _nearest_backward(call: fx.Node | Call) -> Rows | None:
    target: Any = call.target
    gradient = cast(fx.Node, call.args[0])
    small, large = call.meta["val"].shape, gradient.meta["val"].shape
    times = large[AXIS] // small[AXIS]
    if times * small[AXIS] != large[AXIS] or large[AXIS + 1] % small[AXIS + 1]:
        return None

    def run(gradient: torch.Tensor, *_: Any, start: int, stop: int) -> Any:
        shape = [gradient.shape[0], small[1], stop - start, *small[AXIS + 1 :]]
        return target(gradient, list(gradient.shape[AXIS:]), shape, None)

    return Rows(
        rows=small[AXIS], operands=(gradient,), needs=lambda start, stop: ((start * times, stop * times),), run=run
    )


def _window_of(weight: fx.Node, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> _Window:
    return _window(weight.meta["val"].shape[AXIS:], stride, padding, dilation)


def _window(kernel: Any, stride: Any, padding: Any, dilation: Any) -> _Window:
    size, stride, padding, dilation = (v if isinstance(v, int) else v[0] for v in (kernel, stride, padding, dilation))
    return _Window(size=dilation * (size - 1) + 1, stride=stride, padding=padding)


def _pooling(given: Sequence[Any], data: fx.Node, defaults: Sequence[Any]) -> list[Any]:
    """The settings of a pooling: kernel, stride and padding one per axis, the rest as given."""
    axes = data.meta["val"].dim() - AXIS
    settings = [*given, *defaults[len(given) - 1 :]] if defaults else list(given)
    kernel, stride, padding, *rest = settings
    full = [list(v) * (axes // len(v)) if isinstance(v, list | tuple) and v else [v] * axes for v in (kernel, padding)]
    steps = list(stride) * (axes // len(stride)) if stride else full[0]
    return [full[0], steps, full[1], *rest]


def _hollow_rows(hollow: torch.Tensor, samples: int, rows: int) -> torch.Tensor:
    """A tensor of so many samples and rows without memory."""
    shape = (samples, hollow.shape[1], rows, *hollow.shape[AXIS + 1 :])
    return make_hollow(torch.empty(shape, dtype=hollow.dtype, device="meta"), hollow.device)


_RULES: dict[Any, Callable[[fx.Node | Call], Rows | None]] = {
    **dict.fromkeys(ELEMENT_BY_ELEMENT, _elementwise),
    **dict.fromkeys(
        (
            _aten.threshold_backward.default,
            _aten.leaky_relu_backward.default,
            _aten.hardtanh_backward.default,
            _aten.hardswish_backward.default,
            _aten.hardsigmoid_backward.default,
            _aten.gelu_backward.default,
            _aten.silu_backward.default,
            _aten.sigmoid_backward.default,
            _aten.tanh_backward.default,
            _aten.native_batch_norm_backward.default,
            input_gradient_from_sums,
        ),
        _pointwise(0, 1),
    ),
    **dict.fromkeys(
        (_aten.gelu.default, _aten.silu.default, _aten.sigmoid.default, _aten.tanh.default, normalise, sums_of_data),
        _pointwise(0),
    ),
    _aten.cat.default: _concatenation,
    _aten.convolution.default: _convolution,
    convolution_input_gradient: _input_gradient,
    input_gradient_beside_stand_in: _input_gradient,
    _aten.convolution_backward.default: _weight_gradient,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.max_pool3d_with_indices.default: _max_pool,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    _aten.avg_pool2d.default: _average_pool,
    _aten.avg_pool3d.default: _average_pool,
    _aten.avg_pool2d_backward.default: _average_pool_backward,
    _aten.upsample_nearest2d.vec: _nearest,
    _aten.upsample_nearest2d_backward.default: _nearest_backward,
}
