"""Branches on tensors that can be decided while a graph is made break nothing.

A library may look at the values of a tensor that it made itself: positions counted from nought, a causal mask. Dynamo
breaks the graph at any branch on a tensor, as it has no values. If the tensor was made from constants alone, of shapes
that the graph is made for, its value can be computed right there: constant folding, done for conditions only.

Many conditions look at an input instead: is any place of the mask padding, is any label to be left out? The value is
computed as well, and the graph is made for it under a guard: Dynamo computes the condition anew before each call, as
eager does, and takes the graph only if it holds. That is a guarded specialization, as tracing compilers do for shapes.

Idea: ours; the wrapped instructions are those that Dynamo breaks at.

Known limits: conditions that depend on a parameter, on a buffer or on several inputs still break the graph. The table
of instructions is the process's, so what another thread compiles meanwhile is folded too; that changes no result.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import symbolic_convert
from torch._dynamo.guards import install_guard
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._guards import Guard
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Decision", "decided_branches"]

log = logging.getLogger(__name__)

_MOST_CALLS = 64
_MOST_DECISIONS = 16
"""A loop that runs until a tensor says so would be unrolled for each number of turns."""
_MOST_ELEMENTS = 1 << 22
_TRANSLATORS = (symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A branch on an input, and the way that a graph was made for.

    Attributes:
        place: of the input among the leaves of the call's arguments.
        value: of the condition.
        code: of the condition.
        condition: computes it from the input.
    """

    place: int
    value: bool
    code: str
    condition: Callable[[torch.Tensor], torch.Tensor]

    def holds(self, given: Any) -> bool:
        """Whether the branch goes the same way for another input."""
        if not isinstance(given, torch.Tensor):
            return False
        try:
            with torch.no_grad():
                return bool(self.condition(given)) is self.value
        except Exception as error:  # planning for this input runs the module, which raises what is its own
            log.debug("a condition cannot be computed: %s", error)
            return False


@contextlib.contextmanager
def decided_branches(
    decisions: list[Decision] | None = None, leaves: Sequence[Any] = (), state: Sequence[torch.Tensor] = ()
) -> Iterator[None]:
    """While active, Dynamo goes on at branches on tensors that are made from constants, or from one input.

    Args:
        decisions: where branches on inputs are noted; None to break at them.
        leaves: of the call's arguments.
        state: parameters and buffers of the module, which change without a new call.
    """
    jumps = [
        number for name, number in dis.opmap.items() if "JUMP" in name and ("_IF_TRUE" in name or "_IF_FALSE" in name)
    ]
    own = {id(t) for t in state}
    places = {id(t): place for place, t in enumerate(leaves) if isinstance(t, torch.Tensor) and id(t) not in own}
    saved = [(translator, number, translator.dispatch_table[number]) for translator in _TRANSLATORS for number in jumps]
    for translator, number, jump in saved:
        if jump is not None:
            translator.dispatch_table[number] = _folding(jump, decisions, places)
    try:
        yield
    finally:
        for translator, number, jump in saved:
            translator.dispatch_table[number] = jump


def _folding(
    jump: Callable[[Any, Any], Any], decisions: list[Decision] | None, places: dict[int, int]
) -> Callable[[Any, Any], Any]:
    def fold_and_jump(tx: Any, instruction: Any) -> Any:
        condition = tx.stack[-1]
        if isinstance(condition, TensorVariable):
            value = _decided(condition.proxy.node, decisions, places)
            if value is not None:
                tx.stack[-1] = ConstantVariable.create(value)
        return jump(tx, instruction)

    return fold_and_jump


def _decided(node: fx.Node, decisions: list[Decision] | None, places: dict[int, int]) -> bool | None:
    """The value of a condition, if it is made from constants alone or, under a guard, from one input."""
    behind = _behind(node)
    if behind is None:
        return None
    calls, inputs = behind
    if len(inputs) > 1 or (inputs and decisions is None):
        return None
    code, condition = _function(node, calls, inputs)
    given, place = [], None
    for one in inputs:
        real = getattr(one.meta.get("grapharg"), "example", None)
        place = places.get(id(real))
        if not isinstance(real, torch.Tensor) or place is None or real.is_meta:
            return None
        given.append(real)
    try:
        with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
            made = condition(*given)
            if not isinstance(made, torch.Tensor) or made.numel() != 1:
                return None
            value = bool(made)
    except Exception as error:  # whatever it is, Dynamo breaks the graph as it would have
        log.debug("a condition cannot be computed while tracing: %s", error)
        return None
    if place is None:
        return value
    assert decisions is not None
    known = next((d for d in decisions if (d.place, d.value, d.code) == (place, value, code)), None)
    if known is None and len(decisions) >= _MOST_DECISIONS:
        return None
    decision = known or Decision(place=place, value=value, code=code, condition=condition)
    if known is None:
        decisions.append(decision)
    # Dynamo takes what it compiles only where the branch goes the same way.
    install_guard(Guard(inputs[0].meta["grapharg"].source, functools.partial(_add_guard, decision=decision)))
    return value


def _add_guard(builder: Any, guard: Guard, *, decision: Decision) -> None:
    told = f"a branch on {guard.name} goes as when it was planned ({decision.value})"
    builder.get_guard_manager(guard).add_lambda_guard(decision.holds, [told], guard.user_stack)


def _function(node: fx.Node, calls: set[fx.Node], inputs: Sequence[fx.Node]) -> tuple[str, Callable[..., Any]]:
    """The calls behind a node, as code and as a function of the inputs that holds nothing of the graph they are in."""
    alone = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, one in enumerate(inputs):
        copies[one] = alone.placeholder(f"given{number}")
    for call in node.graph.nodes:
        if call in calls:
            copies[call] = alone.node_copy(call, copies.__getitem__)
            copies[call].meta = {}
    alone.output(copies[node])
    made = fx.GraphModule(nn.Module(), alone)
    return made.code, made.forward


def _behind(node: fx.Node) -> tuple[set[fx.Node], list[fx.Node]] | None:
    """All calls and inputs that a node depends on; None if something else is among them, or they cost much."""
    found: set[fx.Node] = set()
    inputs: list[fx.Node] = []
    waiting = [node]
    while waiting:
        call = waiting.pop()
        if call in found or call in inputs:
            continue
        if len(found) == _MOST_CALLS or not _is_settled(call):
            return None
        if call.op == "placeholder":
            inputs.append(call)
        elif call.op in ("call_function", "call_method"):
            found.add(call)
            waiting += call.all_input_nodes
        else:
            return None
    return found, inputs


def _is_settled(call: fx.Node) -> bool:
    """Whether a call makes the same each time, of few elements, and nobody writes over it."""
    made = call.meta.get("example_value")
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    sizes = [t.numel() for t in tensors]
    if any(not isinstance(size, int) or size > _MOST_ELEMENTS for size in sizes):
        return False
    if call.op == "placeholder":
        return bool(tensors) and all(t._version == 0 for t in tensors)  # of fake tensors, which begin with nought
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
