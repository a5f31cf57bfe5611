"""Answers a model gets while it is captured when it asks whether it is: those of eager PyTorch.

Libraries take another road while they are compiled: eager transformers looks at a mask, drops it if it is all ones and
runs another attention kernel; compiled it keeps the mask. Then the captured step is another step than the plain one,
with other bits. Dynamo answers such questions (`torch.compiler.is_compiling()` and its kin) with constants of its own.
While memfit captures, they are answered as in eager. A branch that eager then takes by the values of a tensor breaks
the graph: in subgraphs, and right for any values, since the code between subgraphs runs anew each time.

PyTorch's own code still hears that it is traced, where it asks for the sake of Dynamo alone (`torch.vmap`, flex
attention, module hooks), and so does code that asks for no result's sake: an object that keeps a `ContextVar` out of a
graph, a function that only warns. Where torch's modules choose another kernel by it (encoder layers, attention), they
hear what eager ones do.

Known limits: Dynamo's table of answers is the process's, so what another thread compiles meanwhile hears them too. What
looks at the call stack, at `sys.modules` or at Dynamo's internals sees that it is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions

__all__ = ["eager_answers"]

_CHOOSE_KERNELS = ("torch.nn.modules.transformer", "torch.nn.modules.activation")
"""Modules of torch that take another kernel where they are traced."""

_ASKING_FRAMES = 3
"""A question is asked through so many calls, of a library's own helper say."""


@contextlib.contextmanager
def eager_answers() -> Iterator[None]:
    """While active, code that Dynamo traces hears that it is not compiled, traced or exported."""
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
        return torch._dynamo.variables.ConstantVariable.create(False)

    _put(handlers, dict.fromkeys(saved, answer))
    _put(rules, dict.fromkeys(saved_rules, TorchInGraphFunctionVariable))
    try:
        with _outside_of_compilation():
            yield
    finally:
        _put(handlers, saved)
        _put(rules, saved_rules)


def _put(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Writes entries, and takes out those that are None."""
    for key, entry in entries.items():
        if entry is None:
            table.pop(key, None)
        else:
            table[key] = entry


def _asks_to_be_traced(tx: Any, function: Callable[[], Any]) -> bool:
    """Whether it is torch's own code that asks, so that it can be traced at all."""
    asking = str(tx.f_globals.get("__name__", ""))
    if getattr(function, "__module__", "") in _CHOOSE_KERNELS:
        return False
    return _asks_for_no_result(tx) or (
        (asking == "torch" or asking.startswith("torch.")) and asking not in _CHOOSE_KERNELS
    )


def _asks_for_no_result(tx: Any) -> bool:
    """Whether the answer changes no result: an object asks that keeps a `ContextVar`, or a function that only warns."""
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
    """Keeps `torch.compiler.is_compiling()` false in code that runs while a graph is made: the backward of an op, say.

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
