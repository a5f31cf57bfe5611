"""Gives a model eager PyTorch's answers when it asks, during capture, whether it is being compiled.

Libraries take another code path while they are compiled: in eager mode transformers looks at a mask, drops the mask if
it is all ones and runs another attention kernel; when compiled, transformers keeps the mask. Then the captured step
differs from the baseline step and has different bits. Dynamo answers such questions (`torch.compiler.is_compiling()`
and similar functions) with its own constants. While memfit captures, they are answered as in eager mode. A branch that
eager mode then takes by the values of a tensor breaks the graph: the model runs in subgraphs and is correct for any
values, since the code between subgraphs runs in each call.

PyTorch's own code is still told that it is traced where it asks only because of Dynamo (`torch.vmap`, flex attention,
module hooks). So is code whose results do not depend on the answer: an object that keeps a `ContextVar` out of a graph,
a function that only warns. Modules of torch that choose a kernel by the answer (encoder layers, attention) get the
answer of eager mode.

Known limits: Dynamo's table of answers is shared by the process, so code that another thread compiles meanwhile gets
these answers too. Code that looks at the call stack, at `sys.modules` or at Dynamo's internals sees that it is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from memfit.torch_compat.compiler import (
    ConstantVariable,
    TorchInGraphFunctionVariable,
    trace_rules,
    tracing_state_functions,
)

__all__ = ["eager_answers"]

_CHOOSE_KERNELS = ("torch.nn.modules.transformer", "torch.nn.modules.activation")
"""Modules of torch that use another kernel when they are traced."""

_ASKING_FRAMES = 3
"""How many stack frames are searched for the code that asks; a library may ask through its own helper function."""


@contextlib.contextmanager
def eager_answers() -> Iterator[None]:
    """While active, code that Dynamo traces is told that it is not compiled, traced or exported."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    rules = trace_rules.get_torch_obj_rule_map()
    asked = [function for function, answer in tracing_state_functions().items() if answer]
    capturing = [
        function
        for name in ("cuda", "xpu")
        if (function := getattr(getattr(torch, name, None), "is_current_stream_capturing", None)) is not None
    ]
    saved = {function: handlers.get(function) for function in (*asked, *capturing)}
    saved_rules = {function: rules.get(function) for function in capturing}

    def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = saved[variable.value]
        if theirs is not None and (args or kwargs or _asks_to_be_traced(tx, variable.value)):
            return theirs(variable, tx, *args, **kwargs)
        return ConstantVariable.create(False)

    _put(handlers, dict.fromkeys(saved, answer))
    _put(rules, dict.fromkeys(saved_rules, TorchInGraphFunctionVariable))
    try:
        with _outside_of_compilation():
            yield
    finally:
        _put(handlers, saved)
        _put(rules, saved_rules)


def _put(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Writes entries into a table, and removes keys whose entry is None."""
    for key, entry in entries.items():
        if entry is None:
            table.pop(key, None)
        else:
            table[key] = entry


def _asks_to_be_traced(tx: Any, function: Callable[[], Any]) -> bool:
    """Whether Dynamo's own answer is given: to torch's code, so that it is traceable, or if it changes no result."""
    asking = str(tx.f_globals.get("__name__", ""))
    if getattr(function, "__module__", "") in _CHOOSE_KERNELS:
        return False
    return _asks_for_no_result(tx) or (
        (asking == "torch" or asking.startswith("torch.")) and asking not in _CHOOSE_KERNELS
    )


def _asks_for_no_result(tx: Any) -> bool:
    """Whether the answer changes no result: an object that holds a `ContextVar` asks, or a function that only warns."""
    for _ in range(_ASKING_FRAMES):
        if tx is None:
            return False
        code = tx.f_code
        if code.co_name.lstrip("_").startswith("warn"):
            return True
        first = code.co_varnames[0] if code.co_argcount else ""
        holder = getattr(getattr(tx, "symbolic_locals", {}).get(first), "value", None)
        if any(isinstance(held, ContextVar) for held in getattr(holder, "__dict__", {}).values()):
            return True
        tx = getattr(tx, "parent", None)
    return False


@contextlib.contextmanager
def _outside_of_compilation() -> Iterator[None]:
    """Keeps `torch.compiler.is_compiling()` false in code that runs while a graph is made, such as an op's backward.

    Older versions of torch do not set the flag.
    """
    name = "_compile_session_context"
    saved = getattr(torch.compiler, name, None)
    if saved is None:
        yield
        return
    setattr(torch.compiler, name, contextlib.nullcontext)
    try:
        yield
    finally:
        setattr(torch.compiler, name, saved)
