"""Nodes of a joint graph: marks in their `meta`, the storages they share, and aliases.

Passes leave marks for later passes and for the code that lowers the graph. A mark is an entry of `fx.Node.meta`, so it
is copied with the node.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

__all__ = [
    "HALF_OF",
    "METADATA_ONLY_PREFIX",
    "SEPARATED",
    "STANDS_FOR",
    "is_tangent",
    "is_view",
    "original",
    "returned_storages",
    "storage_key",
]

_aten = torch.ops.aten


METADATA_ONLY_PREFIX = "_metadata_only_"
"""Prefix of the names of graph attributes that stand for a metadata-only operand: only its shape is used."""


STANDS_FOR = "memfit_stands_for"
"""Mark in the `meta` of such an attribute: the node that the attribute replaces."""


HALF_OF = "memfit_half_of"
"""Mark in the `meta` of a node: name of the call that makes the results of both nodes with this mark at once."""


def returned_storages(graph: fx.Graph) -> set[int | None]:
    """The storages of the graph outputs, which the caller holds, by `storage_key`."""
    (output,) = graph.find_nodes(op="output")
    return {storage_key(n) for n in output.args[0] if isinstance(n, fx.Node)}


def storage_key(node: fx.Node) -> int | None:
    """A key that is equal for nodes whose tensors share memory; None if the node does not yield a tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def original(node: Any) -> Any:
    """The node of which a node is an alias through `detach` and `alias`; the node itself if it is not an alias."""
    while node.target in (_aten.detach.default, _aten.alias.default):
        node = node.args[0]
    return node


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_view(node: fx.Node) -> bool:
    """Whether a node takes no time and no memory: a view, or an element of a tuple."""
    if node.target is operator.getitem:
        return True
    value, operands = node.meta.get("val"), [a.meta.get("val") for a in node.all_input_nodes]
    return isinstance(value, torch.Tensor) and any(
        isinstance(o, torch.Tensor) and o.untyped_storage()._cdata == value.untyped_storage()._cdata for o in operands
    )


SEPARATED = "memfit_separated"
"""Mark in the `meta` of a node: the key of the weight gradient that it makes a part of
(`memfit.passes.concat_weight_gradients`)."""
