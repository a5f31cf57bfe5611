"""Keeps a graph whole at branches on tensors, and at sizes read from them, that can be decided while it is made.

A library may look at the values of a tensor that it made itself: positions counted from zero, a causal mask. Other
libraries look at an input: does the mask have any padding, does the length of the longest text, read as a number, fit
the positions? And some compute a padding from sizes that they keep as buffers. Dynamo breaks the graph at all of these
places, because it has no values. Values that can be decided (`memfit.capture.values.decisions`) become constants here,
under a guard: Dynamo computes the condition again before each call, as eager mode does, and uses the graph only if the
condition holds. This is a guarded specialization, as tracing compilers use it for shapes.

Idea: ours. The code that is wrapped is the code where Dynamo breaks the graph: jumps, `item`, slices, and calls of
torch that take sizes.

Known limits: those of `memfit.capture.values.decisions`. The tables of instructions and methods are shared by the
process, so code that another thread compiles meanwhile is folded too; this changes no result.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from memfit.capture.values.decisions import Decision, Given, decided
from memfit.torch_compat.compiler import (
    ConstantVariable,
    ListVariable,
    SymNodeVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
    symbolic_convert,
)

__all__ = ["decided_branches"]

_TRANSLATORS = (symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator)
_MAKING = frozenset(("arange", "empty", "full", "linspace", "ones", "rand", "randn", "zeros"))
"""Functions of torch whose arguments are all sizes or numbers."""
_RESIZING = frozenset(
    (
        *("chunk", "constant_pad_nd", "expand", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "pad"),
        *("repeat", "reshape", "roll", "select", "split", "tile", "unflatten", "unfold", "view"),
    )
)
"""Functions and methods that take a tensor and then sizes."""


@contextlib.contextmanager
def decided_branches(
    decisions: list[Decision] | None = None, leaves: Sequence[Any] = (), state: Mapping[str, torch.Tensor] | None = None
) -> Iterator[None]:
    """While active, Dynamo does not break the graph at decidable branches on tensors and sizes read from tensors.

    Args:
        decisions: list to which decisions on inputs and buffers are added; None to break the graph there.
        leaves: the leaves of the call's arguments.
        state: parameters and buffers of the module by name, which change without a new call.
    """
    state = state or {}
    own = {id(t) for t in state.values()}
    given = Given(
        decisions=decisions,
        places={id(t): place for place, t in enumerate(leaves) if isinstance(t, torch.Tensor) and id(t) not in own},
        buffers={id(t): name for name, t in state.items() if not isinstance(t, torch.nn.Parameter)},
    )
    jumps = [n for name, n in dis.opmap.items() if "JUMP" in name and ("_IF_TRUE" in name or "_IF_FALSE" in name)]
    handlers = [(number, _folding) for number in jumps] + [(dis.opmap["BUILD_SLICE"], _slicing)]
    tables = [translator.dispatch_table for translator in _TRANSLATORS]
    saved = [(table, number, table[number], handler) for table in tables for number, handler in handlers]
    function, method = TorchInGraphFunctionVariable.call_function, TensorVariable.call_method

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(self.value, "__name__", "")
        if name in _MAKING:
            args = [_numbers_in(a, given) for a in args]
        elif name in _RESIZING:
            args = [*args[:1], *(_numbers_in(a, given) for a in args[1:])]
        return function(self, tx, args, kwargs)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "item" and not args:
            number = _number(self, given)
            if number is not None:
                return ConstantVariable.create(number)
        elif name in _RESIZING:
            args = [_numbers_in(a, given) for a in args]
        return method(self, tx, name, args, kwargs)

    for table, number, instruction, handler in saved:
        if instruction is not None:
            table[number] = handler(instruction, given)
    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    TensorVariable.call_method = call_method  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchInGraphFunctionVariable.call_function = function  # type: ignore[method-assign]
        TensorVariable.call_method = method  # type: ignore[method-assign]
        for table, number, instruction, _ in saved:
            table[number] = instruction


def _folding(jump: Callable[[Any, Any], Any], given: Given) -> Callable[[Any, Any], Any]:
    def fold_and_jump(tx: Any, instruction: Any) -> Any:
        condition = tx.stack[-1]
        if isinstance(condition, TensorVariable | SymNodeVariable):
            value = decided(condition.proxy.node, given)
            if value is not None:
                tx.stack[-1] = ConstantVariable.create(bool(value))
        return jump(tx, instruction)

    return fold_and_jump


def _slicing(build: Callable[[Any, Any], Any], given: Given) -> Callable[[Any, Any], Any]:
    def fold_and_build(tx: Any, instruction: Any) -> Any:
        for place in range(-instruction.argval, 0):
            tx.stack[place] = _numbers_in(tx.stack[place], given)
        return build(tx, instruction)

    return fold_and_build


def _numbers_in(argument: Any, given: Given) -> Any:
    """The argument with tensors of one integer replaced by constants, where their values can be decided."""
    if isinstance(argument, ListVariable | TupleVariable):
        items = [_numbers_in(item, given) for item in argument.items]
        if all(new is old for new, old in zip(items, argument.items, strict=True)):
            return argument
        return type(argument)(items)
    if not isinstance(argument, TensorVariable) or argument.dtype is torch.bool:
        return argument
    number = _number(argument, given)
    return ConstantVariable.create(number) if type(number) is int else argument


def _number(tensor: TensorVariable, given: Given) -> bool | int | float | None:
    """The number in a tensor of one element. A boolean may depend on an input, since it has only two values."""
    is_number = getattr(tensor, "dtype", None) is not torch.bool
    value = decided(tensor.proxy.node, given, is_number=is_number)
    found = None if value is None or value.is_complex() else value.item()
    return found if isinstance(found, bool | int | float) else None
