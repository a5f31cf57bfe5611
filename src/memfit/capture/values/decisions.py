"""Values of tensors while a graph is made, and the conditions under which they are the same in another call.

This is constant folding, for the few numbers that Python code asks for while Dynamo traces it. A tensor made from
constants alone has a known value. A tensor made from buffers of few elements, such as the sizes that an audio codec
keeps as tensors, has a known value as long as these buffers do not change. A condition may also depend on one input,
and on numbers read from it: the condition is computed again for each call, and only its outcome has to be the same.
Where sizes are symbols, values may depend on sizes too, and are checked for each size (`Decision.at`).

Idea: ours; tracing compilers guard shapes in the same way.

Known limits: values that depend on a parameter, on a larger buffer or on several inputs are not decided, and neither
are numbers that depend on an input and are used outside of a condition, since every batch may have another number.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from memfit.torch_compat.compiler import install_guard
from memfit.torch_compat.core import Guard, disable_current_modes, pytree, unset_fake_temporarily

__all__ = ["MOST_OF_A_BUFFER", "Decision", "Given", "decided"]

log = logging.getLogger(__name__)

_SYMBOLS = (torch.SymInt, torch.SymBool, torch.SymFloat)
_MOST_CALLS = 64
_MOST_DECISIONS = 16
"""The most decisions on inputs; a loop that ends by an input would be unrolled for each number of iterations."""
_MOST_ELEMENTS = 1 << 22
MOST_OF_A_BUFFER = 16
"""The most elements of a buffer whose values may be taken as constants; a table of positions is not meant."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A condition on one input or buffer, with the outcome that a graph was made for.

    Attributes:
        place: place of the input among the leaves of the call's arguments, or the name of the buffer; None if only
            sizes decide.
        value: outcome of the condition.
        code: code of the condition on an input; the numbers that a buffer is compared with.
        condition: computes the condition from the input or buffer.
        sizes: symbols or expressions that the condition depends on, too.
        of_sizes: makes the condition for the values of these sizes.
    """

    place: int | str | None
    value: bool
    code: str
    condition: Callable[[torch.Tensor], torch.Tensor | bool]
    sizes: tuple[Any, ...] = ()
    of_sizes: Callable[[Sequence[Any]], Callable[[torch.Tensor], torch.Tensor | bool]] | None = None

    def at(self, sizes: Callable[[Any], Any]) -> Decision:
        """The decision for some sizes.

        Args:
            sizes: returns the value of a symbol or an expression.
        """
        if self.of_sizes is None:
            return self
        condition = self.of_sizes([sizes(size) for size in self.sizes])
        return replace(self, condition=condition, sizes=(), of_sizes=None)

    def holds(self, given: Any) -> bool:
        """Whether the condition has the same outcome for another input, or for the buffer as it is now."""
        if not isinstance(given, torch.Tensor) and self.place is not None:
            return False
        try:
            with torch.no_grad():
                return bool(self.condition(given)) is self.value
        except Exception as error:  # planning runs the module with this input, and the module raises its own errors
            log.debug("a condition cannot be computed: %s", error)
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Inputs and buffers that decisions may depend on, and the decisions so far.

    Attributes:
        decisions: where decisions are noted; None to decide by constants only.
        places: places of inputs, by their `id`.
        buffers: names of buffers, by their `id`.
    """

    decisions: list[Decision] | None
    places: Mapping[int, int]
    buffers: Mapping[int, str]


def decided(node: fx.Node, given: Given, *, is_number: bool = False) -> torch.Tensor | None:
    """The value of a tensor in a graph that is being made, if it is certain or can be guarded.

    Args:
        node: the node that makes the tensor.
        given: inputs and buffers to decide by.
        is_number: whether the value itself counts, not only whether it is true.
    """
    behind = None if _is_size(node) else _behind(node)  # Dynamo itself guards conditions on sizes
    if behind is None:
        return None
    calls, behind_it = behind
    found, sizes = [one for one in behind_it if not _is_size(one)], [one for one in behind_it if _is_size(one)]
    if behind_it and given.decisions is None:
        return None
    examples = [getattr(one.meta.get("grapharg"), "example", None) for one in found]
    real = [t for t in examples if isinstance(t, torch.Tensor) and not t.is_meta]
    if len(real) < len(examples):
        return None
    inputs = [number for number, t in enumerate(real) if id(t) in given.places]
    if len(inputs) > 1 or (inputs and is_number):
        return None
    if any(number not in inputs and not _is_small(t, given) for number, t in enumerate(real)):
        return None
    try:
        with disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
            code, compute = _function(node, calls, [*found, *sizes])
            now = [t if number in inputs else t.detach().clone() for number, t in enumerate(real)]
            present = [_present(size.meta["example_value"]) for size in sizes]
            made = compute(*now, *present)
            if isinstance(made, bool | int | float):
                made = torch.tensor(made)  # computed from numbers that were read from a tensor
            value = made if isinstance(made, torch.Tensor) and made.numel() == 1 else None
            is_true = value is not None and bool(value)
    except Exception as error:  # after any error, Dynamo breaks the graph as without memfit
        log.debug("a value cannot be computed while tracing: %s", error)
        return None
    if value is None:
        return None
    symbols = tuple(size.meta["example_value"] for size in sizes)
    if symbols and not inputs:
        expected = value.item() if is_number else is_true
        of_sizes = functools.partial(_of_sizes_alone, compute, tuple(now), expected, is_number)
        decision = Decision(
            place=None, value=True, code=code, condition=of_sizes(present), sizes=symbols, of_sizes=of_sizes
        )
        _note(given, decision)
    for number, (one, t) in enumerate(zip(found, real, strict=True)):
        if number in inputs:
            place: int | str = given.places[id(t)]
            of_one = functools.partial(_of_one, compute, now, number)
            if symbols:
                decision = Decision(
                    place=place, value=is_true, code=code, condition=of_one(present), sizes=symbols, of_sizes=of_one
                )
                if not _note(given, decision):
                    return None
                continue  # a guard of Dynamo would be for the present sizes only
            decision = Decision(place=place, value=is_true, code=code, condition=of_one(()))
        else:
            place, saved = given.buffers[id(t)], now[number]
            equal = functools.partial(torch.equal, saved)
            decision = Decision(place=place, value=True, code=str(saved.tolist()), condition=equal)
        if not _guarded(one, given, decision):
            return None
    return value


def _is_small(tensor: torch.Tensor, given: Given) -> bool:
    return id(tensor) in given.buffers and tensor.numel() <= MOST_OF_A_BUFFER


def _of_one(
    compute: Callable[..., Any], now: Sequence[torch.Tensor], place: int, sizes: Sequence[Any]
) -> Callable[[torch.Tensor], Any]:
    """The computation as a function of the input alone, with the buffers as they are now."""
    before, after = tuple(now[:place]), (*now[place + 1 :], *sizes)
    return lambda given: compute(*before, given, *after)


def _of_sizes_alone(
    compute: Callable[..., Any], now: Sequence[torch.Tensor], expected: Any, is_number: bool, sizes: Sequence[Any]
) -> Callable[[Any], bool]:
    """Whether the computation gives what is expected, as a function that takes nothing into account but the sizes."""

    def holds(_: Any) -> bool:
        made = compute(*now, *sizes)
        found = made.item() if isinstance(made, torch.Tensor) else made
        return bool(found == expected) if is_number else bool(found) is expected

    return holds


def _guarded(one: fx.Node, given: Given, decision: Decision) -> bool:
    """Notes a decision once and has Dynamo guard it; False if there are too many."""
    known = _note(given, decision)
    if known is None:
        return False
    # Dynamo uses the compiled code only where the condition has the same outcome.
    create = functools.partial(_add_guard, decision=known)
    install_guard(Guard(one.meta["grapharg"].source, create))
    return True


def _note(given: Given, decision: Decision) -> Decision | None:
    """Notes a decision once; returns it, or None if there are too many."""
    assert given.decisions is not None
    known = next((d for d in given.decisions if _is_same(d, decision)), None)
    if known is not None:
        return known
    of_inputs = sum(isinstance(d.place, int) for d in given.decisions)
    if isinstance(decision.place, int) and of_inputs >= _MOST_DECISIONS:
        return None
    given.decisions.append(decision)
    return decision


def _is_same(one: Decision, other: Decision) -> bool:
    return (one.place, one.value, one.code) == (other.place, other.value, other.code)


def _add_guard(builder: Any, guard: Guard, *, decision: Decision) -> None:
    told = f"what is read from {guard.name} is as when it was planned ({decision.value})"
    builder.get_guard_manager(guard).add_lambda_guard(decision.holds, [told], guard.user_stack)


def _function(node: fx.Node, calls: set[fx.Node], inputs: Sequence[fx.Node]) -> tuple[str, Callable[..., Any]]:
    """The calls behind a node, as code and as a function of the inputs that holds no reference to their graph."""
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
    """All calls and inputs that a node depends on; None if it depends on anything else, or the calls are expensive."""
    found: set[fx.Node] = set()
    inputs: list[fx.Node] = []
    waiting = [node]
    while waiting:
        call = waiting.pop()
        if call in found or call in inputs:
            continue
        if len(found) == _MOST_CALLS or not _is_settled(call):
            return None
        if call.op == "placeholder" or _is_size(call):
            inputs.append(call)
        elif call.op in ("call_function", "call_method"):
            found.add(call)
            waiting += call.all_input_nodes
        else:
            return None
    return found, inputs


def _is_settled(call: fx.Node) -> bool:
    """Whether a call always has the same result, of few elements, and no call overwrites the result."""
    made = call.meta.get("example_value")
    if _is_size(call):
        return True
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    sizes = [_present(t.numel()) for t in tensors]
    if any(size is None or size > _MOST_ELEMENTS for size in sizes):
        return False
    if call.op == "placeholder":
        return bool(tensors) and all(t._version == 0 for t in tensors)  # of fake tensors, which begin with zero
    names = {str(getattr(user.target, "__name__", user.target)) for user in (call, *call.users)}
    if any(name.endswith("_") and not name.endswith("__") for name in names) or "setitem" in names:
        return False
    if any("out" in user.kwargs for user in call.users):
        return False
    return not (call.op == "call_function" and _draws(call.target))


def _is_size(call: fx.Node) -> bool:
    """Whether a node is a size of an input whose sizes are symbols, or is computed from such sizes alone."""
    value = call.meta.get("example_value")
    parts = list(value) if isinstance(value, torch.Size) else [value]
    symbols = [part for part in parts if isinstance(part, _SYMBOLS)]
    return bool(symbols) and all(_present(symbol) is not None for symbol in symbols)


def _present(value: Any) -> Any:
    """The value of a size now; None if it is not known, as for a number that is read from a tensor."""
    if isinstance(value, torch.Size):
        return torch.Size([_present(part) for part in value])
    if not isinstance(value, _SYMBOLS):
        return value
    return value.node.hint if value.node.has_hint() else None


def _draws(target: Any) -> bool:
    """Whether a function of torch uses a random generator, or leaves its result uninitialised (`empty`)."""
    name = str(getattr(target, "__name__", target))
    return any(part in name for part in ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson", "empty"))
