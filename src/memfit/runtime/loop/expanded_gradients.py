"""Sums over gradients that arrive with repeated numbers: that of `output.sum() / n` is one number, expanded.

AOTAutograd copies such a gradient to memory of its own, in the layout that the backward graph was traced with. A sum
over a repeated number may round otherwise than a sum over copies of it, because the kernel adds up in another order, so
the gradient of a bias would have other bits than in eager mode.

Idea: ops of the backward graph that add up such a gradient, or a view of it, read the gradient as it arrived. All other
ops compute the same numbers from the copy, and take it.

Known limits: sums that run in slices, and sums that a pipeline puts off, read the copy. So does a sum over another
shape of a gradient that repeats along some axes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memfit.fxir.marks import is_tangent
from memfit.torch_compat.core import PlainAOTOutput, TangentAOTInput, current_autograd_node

__all__ = ["RECORD", "repeating", "sum_as_arrived"]

RECORD = "memfit_subgraph_pass"
"""Name of the attribute of an autograd node that holds the record of its pass."""

_aten = torch.ops.aten
_ADDING_UP = (
    *(_aten.sum.dim_IntList, _aten.sum.default, _aten.convolution_backward.default),
    _aten.native_batch_norm_backward.default,
)
"""Ops that add up their first operand in the layout in which it arrives; their results do not lie as it does."""

_RESHAPING = (_aten.view.default, _aten._unsafe_view.default)
_VIEWS = (
    *_RESHAPING,
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default, _aten.unsqueeze.default),
)

_View = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""An op that makes a view, and its arguments behind the tensor."""


def sum_as_arrived(backward: fx.GraphModule) -> frozenset[int]:
    """Has the sums of a backward graph over gradients of outputs read these as they arrived, in place.

    Args:
        backward: a lowered backward graph.

    Returns:
        The outputs whose gradients are read so.
    """
    found = set[int]()
    for node in [n for n in backward.graph.nodes if n.target in _ADDING_UP]:
        views, source = _views_behind(node.args[0])
        desc = source.meta.get("desc")
        output = desc.output if isinstance(desc, TangentAOTInput) else None
        if is_tangent(source) and isinstance(output, PlainAOTOutput):
            node.target = _sum(node.target, output.idx, views)
            found.add(output.idx)
    if found:
        backward.recompile()
    return frozenset(found)


def _views_behind(node: fx.Node) -> tuple[tuple[_View, ...], fx.Node]:
    """The views through which a value is read, first one first, and the node that they are views of."""
    views: list[_View] = []
    while node.target in _VIEWS and not node.kwargs and len(node.all_input_nodes) == 1:
        views.append((node.target, node.args[1:]))
        node = node.all_input_nodes[0]
    return tuple(reversed(views)), node


def _sum(add_up: Callable[..., Any], output: int, views: Sequence[_View]) -> Callable[..., Any]:
    reshapes = any(view in _RESHAPING for view, _ in views)

    def sum_of_gradient(copy: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        record = getattr(current_autograd_node(), RECORD, None)
        arrived = None if record is None else record.repeating.get(output)
        if arrived is None or (reshapes and not _is_one_number(arrived)):
            return add_up(copy, *args, **kwargs)
        for view, settings in views:
            arrived = view(arrived, *settings)
        return add_up(arrived, *args, **kwargs)

    return sum_of_gradient


def repeating(gradients: Mapping[int, torch.Tensor], wanted: frozenset[int]) -> dict[int, torch.Tensor]:
    """The gradients, by output, that repeat numbers along an axis, of the outputs in `wanted`."""
    return {output: g for output, g in gradients.items() if output in wanted and any(_repeats(g))}


def _repeats(tensor: torch.Tensor) -> list[bool]:
    """For each axis with more than one element, whether it repeats numbers."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_complex():
        return []
    return [stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _is_one_number(tensor: torch.Tensor) -> bool:
    return all(_repeats(tensor))
