"""Concatenation, conversion, and the gradients of slices and elements: they move numbers and compute none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import nodes_of, outer_axis
from memfit.ops.batching.axes import argument, first_result, same_position
from memfit.ops.op_rule import Axes, OpRule
from memfit.ops.tiling.same_tile import same_tile_of
from memfit.ops.tiling.tile import Tiling
from memfit.ops.tiling.window import SPACE

__all__ = ["RULES"]

_aten = torch.ops.aten


def _copy(call: fx.Node | Call, batch: int) -> Axes | None:
    where = cast(fx.Node, call.args[0]).meta["val"].device
    same = call.kwargs.keys() <= {"dtype", "layout", "device"} and call.kwargs.get("device", where) == where
    return same_position(call, batch) if same else None


def _concatenation(call: fx.Node | Call, batch: int) -> Axes | None:
    axis = outer_axis(first_result(call), batch)
    along = cast(int, argument(call, 1, "dim", 0)) % first_result(call).dim()
    return None if axis is None or along == axis else Axes(dict.fromkeys(nodes_of(call.args[0]), axis), axis)


def _concatenated_tiles(call: fx.Node | Call, axes: int) -> Tiling | None:
    dimension = cast(int, call.args[1] if len(call.args) > 1 else 0) % call.meta["val"].dim()
    if dimension == 0 or SPACE <= dimension < SPACE + axes:
        return None
    return same_tile_of(call, axes, nodes_of(call.args[0]))


def _padded_back(call: fx.Node | Call, batch: int) -> Axes | None:
    """The rule of the gradient of a slice or of one element along an axis: zeros around it, in a given shape."""
    gradient, sizes, along, *_ = cast(tuple[Any, ...], call.args)
    axis, target = outer_axis(first_result(call), batch), cast(Any, call.target)
    if axis is None or along % len(sizes) == axis:
        return None
    theirs = axis - (along % len(sizes) < axis and gradient.meta["val"].dim() < len(sizes))

    def run(gradient: torch.Tensor, sizes: Sequence[int], *rest: Any) -> Any:
        here = list(sizes)
        here[axis] = gradient.shape[theirs]
        return target(gradient, here, *rest)

    return Axes({gradient: theirs}, axis, run)


RULES = {
    _aten._to_copy.default: OpRule(batch=_copy),
    _aten.cat.default: OpRule(batch=_concatenation, tile=_concatenated_tiles, slices_keep_bits=True),
    _aten.slice_backward.default: OpRule(batch=_padded_back),
    _aten.select_backward.default: OpRule(batch=_padded_back),
}
