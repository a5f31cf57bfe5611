"""Where a forward graph may be cut into stages, and what crosses each cut.

A cut is a place between two calls. Every tensor made before it and read after it crosses; a tensor that is read
further down is handed on by the stages between (the engine sends to the next stage only). Tensors made of nothing but
constants, such as positions or a causal mask, do not cross: each stage that reads one makes it.

A place is no cut where that would not be exact or not be possible: inside `no_grad` or autocast, where the gradient of
something that crosses is laid out differently in memory than itself (kernels look at that), where something that
crosses is no tensor, is not dense in memory, or shares memory with a tensor that is written over later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfit.capture.dynamo import is_in_place
from memfit.pipelining.forward_graph import ForwardGraph

__all__ = ["Cut", "constant_calls", "find_cuts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place between two calls.

    Attributes:
        position: how many calls come before it.
        crossing: the tensors that cross, in the order in which they are made.
        nbytes: their size.
    """

    position: int
    crossing: tuple[fx.Node, ...]
    nbytes: int


def find_cuts(forward: ForwardGraph) -> list[Cut]:
    """All places at which a forward graph may be cut, in order."""
    calls = forward.calls
    place = {node: index for index, node in enumerate(calls)}
    constant = constant_calls(forward)
    last_read = {node: max((place.get(u, len(calls)) for u in node.users), default=-1) for node in calls}
    written_over = _written_over(calls)
    closed = _closed(calls)
    turned = _turned_gradients(forward)
    cuts = []
    alive: list[fx.Node] = []
    for position in range(1, len(calls)):
        made = calls[position - 1]
        if made not in constant:
            alive.append(made)
        alive = [node for node in alive if last_read[node] >= position]
        values: list[Any] = [node.meta.get("example_value") for node in alive]
        if closed[position] or not turned.isdisjoint(alive) or not all(_can_cross(value) for value in values):
            continue
        if any(written_over.get(value.untyped_storage()._cdata, -1) >= position for value in values):
            continue
        if any(value.requires_grad for value in values):
            nbytes = sum(value.numel() * value.element_size() for value in values)
            cuts.append(Cut(position=position, crossing=tuple(alive), nbytes=nbytes))
    return cuts


def constant_calls(forward: ForwardGraph) -> frozenset[fx.Node]:
    """Calls that no input, parameter or random number has a part in, and that have no effect."""
    constant: set[fx.Node] = set()
    for node in forward.calls:
        value = node.meta.get("example_value")
        fixed = isinstance(value, torch.Tensor) and not value.requires_grad and not _is_random(node)
        if fixed and not is_in_place(node) and all(operand in constant for operand in node.all_input_nodes):
            constant.add(node)
    # What is written over is not the same for every reader.
    shared = _written_over(forward.calls)
    return frozenset(n for n in constant if n.meta["example_value"].untyped_storage()._cdata not in shared)


def _turned_gradients(forward: ForwardGraph) -> frozenset[fx.Node]:
    """Calls of which the gradient of the result is laid out in memory in another way than the result.

    Dynamo's fake tensors know how they were made, so a fake backward pass tells.
    """
    loss = forward.loss.meta["example_value"]
    made = {node: node.meta.get("example_value") for node in forward.calls}
    values = {n: v for n, v in made.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True, retain_graph=True)
    return frozenset(
        node
        for (node, value), gradient in zip(values.items(), gradients, strict=True)
        if gradient is not None and _strides(gradient) != _strides(value)
    )


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _is_random(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return any(word in name for word in ("rand", "dropout", "bernoulli", "normal", "multinomial", "empty"))


def _can_cross(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    strides = value.stride()
    outermost_first = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    return value.permute(outermost_first).is_contiguous()


def _written_over(calls: Sequence[fx.Node]) -> dict[int, int]:
    """For storages that a call writes over the last such call."""
    last: dict[int, int] = {}
    for index, node in enumerate(calls):
        if is_in_place(node) and node.args and isinstance(node.args[0], fx.Node):
            value = node.args[0].meta.get("example_value")
            if isinstance(value, torch.Tensor):
                last[value.untyped_storage()._cdata] = index
        out = node.kwargs.get("out")
        for written in pytree.tree_leaves(out):
            if isinstance(written, fx.Node) and isinstance(written.meta.get("example_value"), torch.Tensor):
                last[written.meta["example_value"].untyped_storage()._cdata] = index
    return last


def _closed(calls: Sequence[fx.Node]) -> list[bool]:
    """For each position whether it lies between a switch of autograd or autocast and the one that undoes it."""
    closed = [False] * (len(calls) + 1)
    open_switches = 0
    grad_enabled = True
    for index, node in enumerate(calls):
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            open_switches += 1
        elif name == "_exit_autocast":
            open_switches -= 1
        elif name in ("_set_grad_enabled", "set_grad_enabled"):
            grad_enabled = bool(node.args[0])
        closed[index + 1] = open_switches > 0 or not grad_enabled
    return closed
