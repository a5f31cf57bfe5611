"""Leaves the compiler marks that a model puts on its tensors out of captured graphs, so that they are no error.

Caches of transformers call `torch._dynamo.mark_static_address` on the tensors they make, unless they are told that the
model is compiled, and a captured model is told that it is not (`memfit.capture.eager.compiler_queries`). Dynamo raises
an `AssertionError` where it traces such a call. A mark changes no result, and no graph of memfit needs a mark, so the
calls are left out of captured graphs.

Known limits: Dynamo's tables belong to the process, so graphs that another thread compiles meanwhile leave the calls
out too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from memfit.torch_compat.compiler import ConstantVariable, TorchInGraphFunctionVariable, decorators, trace_rules

__all__ = ["marks_left_out"]

_FORBIDDEN = "_dynamo_forbidden"
"""The attribute that Dynamo's decorator `forbid_in_graph` sets on a function."""


@contextlib.contextmanager
def marks_left_out() -> Iterator[None]:
    """While active, Dynamo leaves out calls that put marks on tensors."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    rules = trace_rules.get_torch_obj_rule_map()
    forbidden = [function for function in _marks() if vars(function).pop(_FORBIDDEN, False)]
    for function in forbidden:
        handlers[function] = _nothing
        rules[function] = TorchInGraphFunctionVariable
    try:
        yield
    finally:
        for function in forbidden:
            handlers.pop(function, None)
            rules.pop(function, None)
            setattr(function, _FORBIDDEN, True)


def _marks() -> list[Callable[..., Any]]:
    names = [name for name in vars(decorators) if name.startswith(("mark_", "maybe_mark_"))]
    return [getattr(decorators, name) for name in names]


def _nothing(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    return ConstantVariable.create(None)
