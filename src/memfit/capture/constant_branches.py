"""Branches on tensors that are the same in every call are decided while a graph is made, and break nothing.

A library may look at the values of a tensor that it made itself: positions counted from nought, a causal mask. Dynamo
breaks the graph at any branch on a tensor, as it has no values. If the tensor was made from constants alone, of shapes
that the graph is made for, its value can be computed right there: constant folding, done for conditions only.

Idea: ours; the wrapped instructions are those that Dynamo breaks at.

Known limits: conditions that depend on an input or a parameter still break the graph. The table of instructions is the
process's, so what another thread compiles meanwhile is folded too; that changes no result.
"""

from __future__ import annotations

import contextlib
import dis
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["constant_branches"]

log = logging.getLogger(__name__)

_MOST_CALLS = 64
_MOST_ELEMENTS = 1 << 22
_TRANSLATORS = (symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator)


@contextlib.contextmanager
def constant_branches() -> Iterator[None]:
    """While active, Dynamo goes on at branches on tensors that are made from constants."""
    jumps = [
        number for name, number in dis.opmap.items() if "JUMP" in name and ("_IF_TRUE" in name or "_IF_FALSE" in name)
    ]
    saved = [(translator, number, translator.dispatch_table[number]) for translator in _TRANSLATORS for number in jumps]
    for translator, number, jump in saved:
        if jump is not None:
            translator.dispatch_table[number] = _folding(jump)
    try:
        yield
    finally:
        for translator, number, jump in saved:
            translator.dispatch_table[number] = jump


def _folding(jump: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fold_and_jump(tx: Any, instruction: Any) -> Any:
        condition = tx.stack[-1]
        if isinstance(condition, TensorVariable):
            value = _value_of(condition.proxy.node)
            if value is not None and value.numel() == 1:
                tx.stack[-1] = ConstantVariable.create(bool(value))
        return jump(tx, instruction)

    return fold_and_jump


def _value_of(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a node of Dynamo's graph makes, if it makes it from constants alone."""
    calls = _calls_behind(node)
    if calls is None:
        return None
    values: dict[fx.Node, Any] = {}
    try:
        with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
            for call in sorted(calls, key=list(node.graph.nodes).index):
                values[call] = _run(call, values)
    except Exception as error:  # whatever it is, Dynamo breaks the graph as it would have
        log.debug("a condition cannot be computed while tracing: %s", error)
        return None
    made = values[node]
    return made if isinstance(made, torch.Tensor) else None


def _run(call: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, (list(call.args), dict(call.kwargs)))
    if call.op == "call_method":
        return getattr(args[0], str(call.target))(*args[1:], **kwargs)
    assert callable(call.target)
    return call.target(*args, **kwargs)


def _calls_behind(node: fx.Node) -> set[fx.Node] | None:
    """All calls that a node depends on; None if something else is among them, or they cost much."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        call = waiting.pop()
        if call in found:
            continue
        if call.op not in ("call_function", "call_method") or len(found) == _MOST_CALLS or not _is_settled(call):
            return None
        found.add(call)
        waiting += call.all_input_nodes
    return found


def _is_settled(call: fx.Node) -> bool:
    """Whether a call makes the same each time, of few elements, and nobody writes over it."""
    made = call.meta.get("example_value")
    sizes = [t.numel() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    if any(not isinstance(size, int) or size > _MOST_ELEMENTS for size in sizes):
        return False
    names = {str(getattr(user.target, "__name__", user.target)) for user in (call, *call.users)}
    if any(name.endswith("_") and not name.endswith("__") for name in names) or "setitem" in names:
        return False
    if any("out" in user.kwargs for user in call.users):
        return False
    return not (call.op == "call_function" and _draws(call.target))


def _draws(target: Any) -> bool:
    """Whether a function of torch looks at a random generator."""
    name = str(getattr(target, "__name__", target))
    return any(part in name for part in ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson", "empty"))
