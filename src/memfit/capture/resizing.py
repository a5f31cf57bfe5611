"""Nearest-neighbour resizing by whole factors, for the lever `tile`.

AOTAutograd takes it apart into index arithmetic and a gather, and its gradient into a scatter onto zeros, of which
nothing tells that neighbours stay neighbours. Where the indices, evaluated, repeat each place a whole number of times,
both are put together again as one call each, and these run in tiles (`memfit.capture.by_tiles`).

Known limits: two axes of space, contiguous; other factors and other interpolations stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memfit.capture.again import Call
from memfit.capture.concatenations import PLAIN_CALL

__all__ = ["gradient_of_repeated", "join_resizing", "repeat_nearest"]

_aten = torch.ops.aten
_MOST_STEPS = 20
"""Of index arithmetic."""


def repeat_nearest(data: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Each element so many times along height and width."""
    samples, channels, height, width = data.shape
    repeated = data[:, :, :, None, :, None].expand(samples, channels, height, rows, width, columns)
    return repeated.reshape(samples, channels, height * rows, width * columns)


def gradient_of_repeated(gradient: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The gradient of what was repeated: the sum over the places of each element."""
    places = cast(torch.Tensor, gradient.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)))
    return places.sum((3, 5))


def join_resizing(module: fx.GraphModule) -> None:
    """Replaces gathers and scatters that resize by whole factors."""
    graph = module.graph
    for target in (_aten._unsafe_index.Tensor, _aten._unsafe_index_put.default):
        for node in graph.find_nodes(op="call_function", target=target):
            is_gather = target is _aten._unsafe_index.Tensor
            small, large = (node.args[0], node) if is_gather else (node, node.args[2])
            with unset_fake_temporarily():
                factors = _factors(node, cast(fx.Node, small), cast(fx.Node, large))
            if factors is None:
                continue
            operand = small if is_gather else large
            with graph.inserting_before(node):
                made = graph.call_function(repeat_nearest if is_gather else gradient_of_repeated, (operand, *factors))
            whole = Call(name=node.name, target=node.target, args=node.args, meta=node.meta)
            made.meta = {**node.meta, PLAIN_CALL: whole}
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _factors(node: fx.Node, small: fx.Node, large: fx.Node) -> tuple[int, int] | None:
    """How often each place is repeated along height and width; None if it is not so."""
    values = [n.meta["val"] for n in (small, large)]
    indices = cast(list[Any], node.args[1])
    if not all(v.dim() == 4 and v.is_contiguous() for v in values):
        return None
    if len(indices) != 4 or indices[0] is not None or indices[1] is not None:
        return None
    if node.target is _aten._unsafe_index_put.default and not _is_sum_onto_zeros(node):
        return None
    found: list[int] = []
    for axis, index in zip((2, 3), indices[2:], strict=True):
        times, rest = divmod(values[1].shape[axis], values[0].shape[axis])
        places = _evaluated(index, _MOST_STEPS) if isinstance(index, fx.Node) and not rest else None
        if places is None or places.numel() != values[1].shape[axis]:
            return None
        if not torch.equal(places.flatten(), torch.arange(values[1].shape[axis]) // times):
            return None
        found.append(times)
    if found == [1, 1]:
        return None
    return found[0], found[1]


def _is_sum_onto_zeros(node: fx.Node) -> bool:
    onto = node.args[0]
    return isinstance(onto, fx.Node) and onto.target is _aten.new_zeros.default and node.args[3:] == (True,)


def _evaluated(node: fx.Node, steps: int) -> torch.Tensor | None:
    """What a node makes of constants alone; None if it takes more than these."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or steps == 0:
        return None
    known: dict[fx.Node, torch.Tensor] = {}
    for operand in node.all_input_nodes:
        value = _evaluated(operand, steps - 1)
        if value is None:
            return None
        known[operand] = value
    if not known and node.target is not _aten.arange.default and node.target is not _aten.arange.start_step:
        return None
    result = node.target(*fx.map_arg(node.args, known.__getitem__), **fx.map_arg(node.kwargs, known.__getitem__))
    return result if isinstance(result, torch.Tensor) else None
