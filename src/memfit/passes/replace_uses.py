"""Replaces a node of a joint graph by another one, in its uses and in the views that share its memory.

A fake tensor in `meta` says which memory a node's result lies in, and the reading tells ops from views by it
(`memfit.fxir.alias_analysis`). A view of a node that is replaced by one with other memory still states the memory that
is gone, and would be read as an op with a result of its own. So the fake results of such views are recomputed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from memfit.fxir.signature import tensors_of
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["replace_uses"]


def replace_uses(node: fx.Node, by: fx.Node) -> None:
    """Has all users of a node read another one, whose `meta` is complete; the node itself stays in the graph."""
    memory, users = _memory(node), list(node.users)
    node.replace_all_uses_with(by)
    if memory != _memory(by):
        _rebase(users, memory)


def _rebase(users: list[fx.Node], memory: frozenset[int]) -> None:
    """Moves views that lie in a memory to the memory of the nodes that they now read."""
    for user in users:
        if user.op != "call_function" or memory.isdisjoint(_memory(user)):
            continue
        operands, named = fx.map_arg((user.args, dict(user.kwargs)), lambda operand: operand.meta.get("val"))
        target: Any = user.target
        with torch.no_grad(), detect_fake_mode(user.meta["val"]) or nullcontext():
            user.meta["val"] = target(*operands, **named)
        _rebase(list(user.users), memory)


def _memory(node: fx.Node) -> frozenset[int]:
    return frozenset(int(tensor.untyped_storage()._cdata) for tensor in tensors_of(node))
