"""Merges calls that a model makes twice with the same operands.

Attention layers often rebuild the same mask or rotary table. Autograd saves each copy; torch's own partitioner merges
the copies, so a plan without this merge would be slower. Only calls that do not depend on gradients are merged: a
result of the backward pass cannot be recomputed, and would be live from its first reader to its last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import OpOverload

__all__ = ["merge_repeated"]


def merge_repeated(module: fx.GraphModule) -> None:
    """Replaces a pure call by an earlier one with the same target and operands."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    returned = {_memory(node) for node in output.all_input_nodes}  # tensors that the caller holds must stay separate
    first: dict[tuple[Any, ...], fx.Node] = {}
    after_gradients: set[fx.Node] = set()
    for node in list(graph.nodes):
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(operand in after_gradients for operand in node.all_input_nodes):
            after_gradients.add(node)
        elif node.op == "call_function" and _memory(node) not in returned and _is_pure(node):
            earlier = first.setdefault((node.target, _hashable(node.args), _hashable(node.kwargs)), node)
            if earlier is not node:
                replace_uses(node, earlier)
                graph.erase_node(node)


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    # Only torch's own ops say whether they are random.
    if not isinstance(target, OpOverload) or target.namespace != "aten" or _memory(node) is None:
        return False
    return not (node.is_impure() or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), *map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in sorted(value.items()))
    # 1, 1.0 and True are equal but not the same argument.
    return (type(value), value)
