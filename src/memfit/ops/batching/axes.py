"""Rules that find the axes along which the operands and results of a call have the samples of a batch.

Most ops of a network treat each sample of the batch by itself: convolutions, activations, attention within a sample,
pooling, normalisation of a sample, batch normalisation once its statistics are known (`memfit.fxir.call`), and the
gradients of their data. Other ops, above all weight gradients, are sums over the batch. Ops that couple samples in
another way have no rule, ops that put anything but samples outermost in memory are recognised by the layout, and both
run whole.

A sample need not be one row: the tokens of a batch are a matrix of batch times length rows, and attention heads are
another view of the same memory. So the batch is a number, and a tensor has samples along an axis if that number divides
the size of the axis: the quotient is the number of consecutive rows that belong to one sample. Results have samples
outermost in memory; operands may be any view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import nodes_of, outer_axis, results_of
from memfit.fxir.marks import METADATA_ONLY_PREFIX
from memfit.ops.kernels.convolution import make_metadata_only
from memfit.ops.kernels.library import direct
from memfit.ops.op_rule import Axes

__all__ = [
    "argument",
    "first_result",
    "not_along",
    "of_metadata_only",
    "operands_at",
    "rows",
    "rows_beside_shape",
    "same_position",
]


def rows(
    *positions: int, when: Callable[[fx.Node | Call], bool] | None = None
) -> Callable[[fx.Node | Call, int], Axes | None]:
    """The rule of calls that take samples along the first axis of operands at `positions`, and other operands whole.

    Args:
        positions: positions of these operands.
        when: whether a call does so; otherwise it mixes samples and runs whole.
    """

    def rule(call: fx.Node | Call, batch: int) -> Axes | None:
        sliced = operands_at(call, positions)
        return None if sliced is None or (when is not None and not when(call)) else Axes(dict.fromkeys(sliced, 0), 0)

    return rule


def rows_beside_shape(*positions: int) -> Callable[[fx.Node | Call, int], Axes | None]:
    """`rows` for calls whose second operand gives the shape of the result and no values."""

    def rule(call: fx.Node | Call, batch: int) -> Axes | None:
        sliced = operands_at(call, positions)
        if sliced is None or not of_metadata_only(call):
            return None
        return Axes(dict.fromkeys(sliced, 0), 0, _with_metadata_only_slice(call.target))

    return rule


def of_metadata_only(call: fx.Node | Call) -> bool:
    """Whether the second operand of a call is a metadata-only tensor."""
    return isinstance(call.args[1], fx.Node) and str(call.args[1].target).startswith(METADATA_ONLY_PREFIX)


def _with_metadata_only_slice(target: Any) -> Callable[..., Any]:
    kernel = direct(target)

    def run(gradient: torch.Tensor, metadata_only: torch.Tensor, *rest: Any) -> Any:
        like = torch.empty_strided(
            (gradient.shape[0], *metadata_only.shape[1:]),
            metadata_only.stride(),
            dtype=metadata_only.dtype,
            device="meta",
        )
        return kernel(gradient, make_metadata_only(like, gradient.device), *rest)

    run.__name__ = getattr(target, "__name__", str(target))
    return run


def same_position(call: fx.Node | Call, batch: int) -> Axes | None:
    """The rule of pointwise calls: samples of the result are made of the same samples of the broadcast operands."""
    result = first_result(call)
    axis = outer_axis(result, batch)
    if axis is None or result.dim() < 2:
        return None
    operands: dict[fx.Node, int] = {}
    for node in nodes_of((call.args, call.kwargs)):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        theirs = axis - (result.dim() - value.dim())
        if theirs >= 0 and value.shape[theirs] == result.shape[axis]:
            operands[node] = theirs
    return Axes(operands, axis)


def not_along(place: int, *positions: int) -> Callable[[fx.Node | Call, int], Axes | None]:
    """The rule of calls that work along one axis, argument number `place`, which must not be the axis of samples."""

    def rule(call: fx.Node | Call, batch: int) -> Axes | None:
        sliced, axis = operands_at(call, positions), outer_axis(first_result(call), batch)
        along = cast(int, argument(call, place, "dim", 0))
        if sliced is None or axis is None or along % first_result(call).dim() == axis:
            return None
        return Axes(dict.fromkeys(sliced, axis), axis)

    return rule


def operands_at(call: fx.Node | Call, positions: Sequence[int]) -> list[fx.Node] | None:
    """The operands at `positions`; None unless all are tensors and no other argument is one of them."""
    found = [call.args[p] for p in positions if p < len(call.args)]
    nodes = [node for node in found if isinstance(node, fx.Node)]
    others = nodes_of([a for p, a in enumerate(call.args) if p not in positions])
    return nodes if len(nodes) == len(positions) and not set(nodes) & set(others) else None


def argument(call: fx.Node | Call, position: int, name: str, default: object) -> object:
    """An argument that may be given by position, by name or not at all."""
    return call.args[position] if position < len(call.args) else call.kwargs.get(name, default)


def first_result(call: fx.Node | Call) -> torch.Tensor:
    """The fake tensor of the call's first result."""
    return cast(torch.Tensor, results_of(call)[0])
