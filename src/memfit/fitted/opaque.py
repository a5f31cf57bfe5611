"""Makes a fitted module opaque to code that the user compiles.

Dynamo traces a module's `forward` and never looks at the slot for a compiled call, so `torch.compile` around a fitted
module, or around a function that calls one, would bypass the plan without a message. Here Dynamo is made to call the
module as `module(...)` does in eager: through the slot, whose content Dynamo does not trace. So Dynamo's graph breaks
at the fitted module, which runs its plan; with `fullgraph=True` this is Dynamo's error, which names memfit.

Known limits: this replaces a method of Dynamo's variable for modules, looked up by name; in a torch version without a
method of that name, compiled code still bypasses the slot. Code that ran compiled before does not look at the slot
again, so `fit` makes Dynamo forget its compiled code; a plan applied separately (`Plan.apply`) does not.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from memfit.capture.dynamo.own_calls import in_own_call
from memfit.torch_compat.compiler import skip
from memfit.torch_compat.core import saved_tensor_hooks_aside

__all__ = ["make_opaque", "not_traced", "undisturbed"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REPLACED = "_memfit_replaced"


def make_opaque(slot_type: type) -> None:
    """Makes Dynamo call modules through the slot if the slot holds a `slot_type`; a second call has no effect."""
    try:
        from memfit.torch_compat.compiler import UnspecializedNNModuleVariable, UserFunctionVariable
    except ImportError:  # torch's private modules were rearranged
        return
    variable: Any = UnspecializedNNModuleVariable
    plainly = getattr(variable, "call_function", None)
    by_name = getattr(variable, "get_source_by_walking_mro", None)
    if plainly is None or by_name is None or getattr(plainly, _REPLACED, False):
        return

    takes_context = "tx" in inspect.signature(by_name).parameters  # not in torch 2.11

    def context(tx: Any) -> tuple[Any, ...]:
        return (tx,) if takes_context else ()

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        exporting = torch.compiler.is_exporting() or getattr(tx, "export", False)
        if exporting or in_own_call() or not isinstance(getattr(self.value, "_compiled_call_impl", None), slot_type):
            return plainly(self, tx, args, kwargs)
        source = by_name(self, *context(tx), "_wrapped_call_impl") if self.source else None
        function: Any = nn.Module._wrapped_call_impl
        called: Any = UserFunctionVariable(function, source=source)
        return called.call_function(tx, [self, *args], kwargs)

    setattr(call_function, _REPLACED, True)
    variable.call_function = call_function


def not_traced(function: _Function) -> _Function:
    """Keeps Dynamo out of a function's own code; Dynamo still traces the functions that it calls."""
    marked: Any = skip(function)
    marked._torchdynamo_disable_msg = "memfit plans this module; its call is not traced"
    return function


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Disables, while planning, the caller's hooks on saved tensors and the caller's anomaly detection."""
    with saved_tensor_hooks_aside(), torch.autograd.set_detect_anomaly(False):
        yield
