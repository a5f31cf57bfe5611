"""Front ends: they find the graphs of a module's call, and run what stands for them.

Capture needs the operations of a forward pass as FX graphs, and a planned step needs something that runs the module's
own code with other functions in place of these graphs. Which code does both is a choice of its own; the protocol
`Frontend` says what it must do. It has two members: Dynamo (`memfit.capture.dynamo.compiled_call`), which traces the
code of any module and guards what it found; and graphs that were traced before (`memfit.capture.fx_module`), which need
neither.

Known limits: the runtime looks for Dynamo's call on the stack to tell whether code ran before a graph
(`call_has_begun`); it never finds one for another front end. A front end hands over FX graphs of torch's functions. A
framework without them needs a capture and a runtime of its own; planning, simulation and strategies do not depend on
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from memfit.capture.call_settings import Backend, CallSettings
from memfit.capture.dynamo.compiled_call import call_by_dynamo
from memfit.capture.fx_module import OneGraph, call_of_graph

__all__ = ["Frontend", "frontend_of"]


class Frontend(Protocol):
    """Turns the call of a module into graphs."""

    def __call__(self, model: nn.Module, backend: Backend, settings: CallSettings) -> Callable[..., Any]:
        """Prepares the call; nothing is traced yet.

        Args:
            model: the module.
            backend: is given each graph once, when a call of the module first reaches it.
            settings: how the call is turned into graphs.

        Returns:
            A function that takes the arguments of the module and returns its output. It runs the module's code, with
            the functions that the backend returned in place of the graphs. Where the code takes another way than a
            graph, it hands over another graph or raises. The caller sees to it that shapes and dtypes are the same in
            all calls.
        """
        ...


def frontend_of(model: nn.Module) -> Frontend:
    """The front end for a module."""
    return call_of_graph if isinstance(model, OneGraph) else call_by_dynamo
