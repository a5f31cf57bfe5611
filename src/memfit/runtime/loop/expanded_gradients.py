"""Ops that add up a gradient with repeated numbers: that of `output.sum() / n` is one number, expanded to a shape.

AOTAutograd copies such a gradient to memory of its own, in the layout that the backward graph was traced with. A sum
over a repeated number may round otherwise than a sum over copies of it, because the kernel adds up in another order, so
the gradient of a bias would have other bits than in eager mode.

Idea: an op that adds up such a gradient, or a view of it, reads the gradient as it arrived. All other ops compute the
same numbers from the copy, and take it. Of a convolution only the bias gradient is such a sum, and the rest is computed
from the copy: from the gradient as it arrived, the kernel would make a second copy.

Known limits: sums that run in slices, and sums that a pipeline puts off, read the copy. So does a sum over another
shape of a gradient that repeats along some axes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.marks import is_tangent
from memfit.ops.op_rule import View
from memfit.ops.registry import rule_of
from memfit.torch_compat.core import PlainAOTOutput, TangentAOTInput, conv_backend, current_autograd_node

__all__ = ["RECORD", "repeating", "sum_as_arrived"]

RECORD = "memfit_subgraph_pass"
"""Name of the attribute of an autograd node that holds the record of its pass."""

_aten = torch.ops.aten
_SUMS = (_aten.sum.dim_IntList, _aten.sum.default, _aten.native_batch_norm_backward.default)
"""Ops that add up their first operand in the layout in which it arrives; their results do not lie as it does."""

_OF_ANY_LAYOUT = (View.NOTHING, View.AXES, View.TWO_AXES, View.SHAPE)
"""Views that do not depend on the strides of their operand, but for whether a shape is possible."""

_COPYING = ("Mkldnn", "???", "SlowDilated2d", "SlowDilated3d", "SlowTranspose3d")
"""Backends of convolutions that add up a copy of the gradient themselves. `???` is oneDNN, transposed."""

_View = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""An op that makes a view, and its arguments behind the tensor."""

_Arrived = Callable[[], torch.Tensor | None]
"""Returns the view of a gradient as it arrived in the backward pass that runs; None if nothing is repeated there."""


def sum_as_arrived(backward: fx.GraphModule) -> frozenset[int]:
    """Has the ops of a backward graph that add up gradients of outputs read these as they arrived. Changes the graph.

    Args:
        backward: a lowered backward graph.

    Returns:
        The outputs whose gradients are read so.
    """
    found = set[int]()
    for node in list(backward.graph.nodes):
        reading = _reading(node)
        if reading is None:
            continue
        views, source = _views_behind(node.args[0])
        desc = source.meta.get("desc")
        output = desc.output if isinstance(desc, TangentAOTInput) else None
        if is_tangent(source) and isinstance(output, PlainAOTOutput):
            node.target = reading(node.target, _arrived(output.idx, views))
            found.add(output.idx)
    if found:
        backward.recompile()
    return frozenset(found)


def _reading(node: fx.Node) -> Callable[[Callable[..., Any], _Arrived], Callable[..., Any]] | None:
    """The function that has the op of a node read its first operand as it arrived; None for an op that need not."""
    if node.target in _SUMS:
        return _whole
    if node.target is not _aten.convolution_backward.default:
        return None
    _, data, weight, bias_sizes, *settings, mask = cast(tuple[Any, ...], node.args)
    if not mask[2]:
        return None
    backend = conv_backend(data.meta["val"], weight.meta["val"], None, *settings, bias_sizes)
    return None if backend in _COPYING else _bias_only


def _whole(op: Callable[..., Any], arrived: _Arrived) -> Callable[..., Any]:
    def sum_of_gradient(copy: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gradient = arrived()
        return op(copy if gradient is None else gradient, *args, **kwargs)

    return sum_of_gradient


def _bias_only(op: Callable[..., Any], arrived: _Arrived) -> Callable[..., Any]:
    def convolution_backward(copy: torch.Tensor, *args: Any) -> Any:
        gradient = arrived()
        if gradient is None:
            return op(copy, *args)
        *rest, mask = args
        of_bias = op(gradient, *rest, [False, False, True])[2]
        of_data, of_weight, _ = op(copy, *rest, [*mask[:2], False]) if any(mask[:2]) else (None, None, None)
        return of_data, of_weight, of_bias

    return convolution_backward


def _views_behind(node: fx.Node) -> tuple[tuple[_View, ...], fx.Node]:
    """The views through which a value is read, first one first, and the node that they are views of."""
    views: list[_View] = []
    while rule_of(node.target).view in _OF_ANY_LAYOUT and not node.kwargs and len(node.all_input_nodes) == 1:
        views.append((cast(Callable[..., torch.Tensor], node.target), node.args[1:]))
        node = node.all_input_nodes[0]
    return tuple(reversed(views)), node


def _arrived(output: int, views: Sequence[_View]) -> _Arrived:
    reshapes = any(rule_of(view).view is View.SHAPE for view, _ in views)

    def arrived() -> torch.Tensor | None:
        record = getattr(current_autograd_node(), RECORD, None)
        gradient: torch.Tensor | None = None if record is None else record.repeating.get(output)
        if gradient is None or (reshapes and not all(_repeats(gradient))):
            return None
        for view, settings in views:
            gradient = view(gradient, *settings)
        return gradient

    return arrived


def repeating(gradients: Mapping[int, torch.Tensor], wanted: frozenset[int]) -> dict[int, torch.Tensor]:
    """The gradients, by output, that repeat numbers along an axis, of the outputs in `wanted`."""
    return {output: g for output, g in gradients.items() if output in wanted and any(_repeats(g))}


def _repeats(tensor: torch.Tensor) -> list[bool]:
    """For each axis with more than one element, whether it repeats numbers."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_complex():
        return []
    return [stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
