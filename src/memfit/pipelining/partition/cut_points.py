"""The places where a forward graph may be cut into stages, and the tensors that cross each cut.

A cut is a place between two calls. Every tensor that is produced before the cut and read after it crosses the cut; if
only a later stage reads the tensor, the stages between hand it on (the engine sends to the next stage only). Tensors
computed from constants only, such as positions or a causal mask, do not cross: each stage that reads one computes it.

A place is not a cut if a cut there is not exact or not possible: inside `no_grad` or autocast; if a value that crosses
is not a tensor, is not dense in memory, has a gradient that is not dense, shares memory with another tensor that
crosses, or is written over later; and between calls that touch a buffer which the step writes over.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.capture.dynamo.dynamo_graph import is_in_place
from memfit.capture.eager.fake_strides import strides_of_kernels
from memfit.pipelining.partition.boundary_layout import is_dense
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.torch_compat.core import OpOverload, detect_fake_mode, pytree

__all__ = ["Cut", "constant_calls", "find_cuts"]

_OPERATORS_IN_PLACE = frozenset(
    {operator.setitem, operator.delitem}
    | {getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:])}
)
"""`x[i] = y`, `x += y` and similar operators."""

_REPEATABLE = frozenset(
    (
        *("arange", "zeros", "ones", "full", "eye", "linspace", "tril", "triu", "zeros_like", "ones_like", "full_like"),
        *("add", "sub", "rsub", "mul", "truediv", "div", "floordiv", "pow", "neg", "sin", "cos", "exp", "log", "outer"),
        *("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "invert", "logical_not", "logical_and", "logical_or"),
        *("view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "permute", "t", "getitem", "flatten"),
        *("to", "float", "bool", "int", "long", "type_as", "masked_fill", "where", "cumsum", "cat", "stack", "repeat"),
    )
)
"""Names of calls that give the same result every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place between two calls.

    Attributes:
        position: number of calls before it.
        crossing: the tensors that cross, in the order in which they are produced.
        nbytes: size of these tensors.
        gradient_strides: strides of the gradients of these tensors, for those that receive a gradient.
    """

    position: int
    crossing: tuple[fx.Node, ...]
    nbytes: int
    gradient_strides: Mapping[fx.Node, tuple[int, ...]]


def find_cuts(forward: ForwardGraph) -> list[Cut]:
    """All cuts of a forward graph that are possible, in order."""
    calls = forward.calls
    place = {node: index for index, node in enumerate(calls)}
    constant = constant_calls(forward)
    last_read = {node: max((place.get(u, len(calls)) for u in node.users), default=-1) for node in calls}
    written_over = _written_over(calls)
    closed = _closed(calls)
    for first, last in _touching(forward, written_over):
        closed[first + 1 : last + 1] = [True] * (last - first)
    strides = _gradient_strides(forward)
    scattered = {node for node, stride in strides.items() if not is_dense(node.meta["example_value"].shape, stride)}
    cuts = []
    alive: list[fx.Node] = []
    for position in range(1, len(calls)):
        made = calls[position - 1]
        if made not in constant:
            alive.append(made)
        alive = [node for node in alive if last_read[node] >= position]
        values: list[Any] = [node.meta.get("example_value") for node in alive]
        if closed[position] or not scattered.isdisjoint(alive) or not all(_can_cross(value) for value in values):
            continue
        storages = [value.untyped_storage()._cdata for value in values]
        if len(set(storages)) < len(storages) or any(written_over.get(one, -1) >= position for one in storages):
            continue
        if any(value.requires_grad for value in values):
            nbytes = sum(value.numel() * value.element_size() for value in values)
            own = {node: strides[node] for node in alive if node in strides}
            cuts.append(Cut(position=position, crossing=tuple(alive), nbytes=nbytes, gradient_strides=own))
    return cuts


def constant_calls(forward: ForwardGraph) -> frozenset[fx.Node]:
    """Calls that each stage may compute for itself: they depend on no input, parameter or random number.

    Only calls that are known to give the same result every time are constant; other results cross, which is always
    right.
    """
    constant: set[fx.Node] = set()
    shared = _written_over(forward.calls)  # a storage that is written over is not the same for every reader
    for node in forward.calls:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.requires_grad or _name(node) not in _REPEATABLE:
            continue
        if value.untyped_storage()._cdata not in shared and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    return frozenset(constant)


def _is_unneeded(node: fx.Node) -> bool:
    """Whether a call without users may be at any place: it counts API uses, asserts, or is a leftover."""
    return _name(node) in ("log_api_usage_once", "assert") or _name(node) in _REPEATABLE


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).strip("_")


def _gradient_strides(forward: ForwardGraph) -> dict[fx.Node, tuple[int, ...]]:
    """The strides of the gradients of calls' results.

    Dynamo's fake tensors have autograd graphs, so a fake backward pass gives the strides.
    """
    loss = forward.loss.meta["example_value"]
    made = {node: node.meta.get("example_value") for node in forward.calls}
    values = {n: v for n, v in made.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    # Formulas of gradients create tensors of their own, such as zeros; these must be fake too.
    with detect_fake_mode(loss) or nullcontext(), strides_of_kernels():
        gradients = torch.autograd.grad(loss, list(values.values()), allow_unused=True, retain_graph=True)
    found = zip(values, gradients, strict=True)
    return {node: tuple(gradient.stride()) for node, gradient in found if gradient is not None}


def _can_cross(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_dense(value.shape, value.stride())


def _written_over(calls: Sequence[fx.Node]) -> dict[int, int]:
    """For each storage that calls write over, the last of these calls."""
    last: dict[int, int] = {}
    for index, node in enumerate(calls):
        for written in _written(node):
            value = written.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                last[value.untyped_storage()._cdata] = index
    return last


def _written(node: fx.Node) -> list[fx.Node]:
    """Operands that a call writes over."""
    written: list[Any] = pytree.tree_leaves(node.kwargs.get("out"))
    if is_in_place(node) or node.target in _OPERATORS_IN_PLACE:
        written += node.args[:1]
    if isinstance(node.target, OpOverload):
        arguments = node.target._schema.arguments
        given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
        written += [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [one for one in pytree.tree_leaves(written) if isinstance(one, fx.Node)]


def _touching(forward: ForwardGraph, written_over: Mapping[int, int]) -> list[tuple[int, int]]:
    """The first and last call that touch a buffer which the step writes over: both need the same copy of the buffer."""
    buffers = {node.meta["example_value"].untyped_storage()._cdata for node in forward.states} & set(written_over)
    touched: dict[int, list[int]] = {}
    for index, node in enumerate(forward.calls):
        for operand in node.all_input_nodes:
            value = operand.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in buffers:
                touched.setdefault(value.untyped_storage()._cdata, []).append(index)
    return [(places[0], places[-1]) for places in touched.values()]


def _closed(calls: Sequence[fx.Node]) -> list[bool]:
    """For each position, whether it is between calls that switch a mode on and off, such as autograd or autocast."""
    closed = [False] * (len(calls) + 1)
    depth = 0
    grad_enabled = True
    unknown: list[int] = []
    for index, node in enumerate(calls):
        name = getattr(node.target, "__name__", "")
        if name.startswith("_enter"):
            depth += 1
        elif name.startswith("_exit"):
            depth -= 1
        elif name in ("_set_grad_enabled", "set_grad_enabled"):
            grad_enabled = bool(node.args[0])
        elif not node.users and not _written(node) and not _is_unneeded(node):
            unknown.append(index)  # nothing reads its result, so it is there for a side effect
        closed[index + 1] = depth > 0 or not grad_enabled
    if unknown:
        closed[unknown[0] + 1 : unknown[-1] + 1] = [True] * (unknown[-1] - unknown[0])
    return closed
