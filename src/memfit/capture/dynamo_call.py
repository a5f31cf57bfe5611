"""A module's call as Dynamo compiled it for a capture, which the plans of that step run too.

A step is captured once, and then compiled for each plan that is tried: to measure it, to correct it, to train. What
Dynamo makes of the module's code and the guards that it sets do not depend on the plan, and for many models following
the code takes longer than all else.

*Idea*: late binding. What Dynamo was given for a graph looks up who runs the graph now: nobody, while the step is
captured, else a plan, which traces its own copy of the graph when it is first run. Where the guards fail, Dynamo
follows the code anew for the plan that runs; the next plan of the capture compiles what it finds there for itself.

Known limits: the call holds the module. A sharded module is followed anew, as its capture gathers its parameters.
Behind a break a graph that the capture did not come to is made for the plan that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from memfit.capture.dynamo_graph import copied
from memfit.capture.gradients.returned_views import Views, calling_after
from memfit.capture.gradients.shared_inputs import static_example
from memfit.capture.traced_graph import DynamoGraph, Trace, as_dynamo_made, as_it_was
from memfit.capture.values.decisions import Decision

__all__ = ["DynamoCall", "RunsGraphs", "made_while_running", "running_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunsGraphs:
    """A plan as the call that Dynamo compiled sees it.

    Attributes:
        backend: compiles a graph that Dynamo made for it, as a backend of Dynamo's does.
        compile_graph: compiles a copy of a graph of the capture, given examples of its operands and the graph.
        compiled: the graphs of the capture that have been compiled.
    """

    backend: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    compile_graph: Callable[[fx.GraphModule, Sequence[Any], DynamoGraph], Callable[..., Any]]
    compiled: dict[DynamoGraph, Callable[..., Any]] = field(default_factory=dict)

    def run(self, graph: DynamoGraph, views: Views, inputs: Sequence[Any], traces: Sequence[Trace] = ()) -> Any:
        """Runs a graph of the capture; compiles it at first, from one of its traces where one serves."""
        call = self.compiled.get(graph)
        if call is None:
            gm = copied(graph.gm)
            with as_it_was(graph):
                fakes = _known_as_static(graph, inputs)
                examples = [*inputs, *(static_example(view) for view in views(*inputs))]
                call = self.compile_graph(gm, examples, replace(graph, traces=list(traces)))
            del fakes
            call = self.compiled[graph] = calling_after(views, call)
        return call(*inputs)


def made_while_running(gm: fx.GraphModule, inputs: Sequence[Any], identity: object) -> Callable[..., Any]:
    """Compiles a graph that Dynamo made while a plan runs, since a guard failed.

    Dynamo keeps it with the call, so other plans of the capture come to it too, and each compiles it for itself.

    Args:
        gm: the graph.
        inputs: examples.
        identity: of the call.

    Returns:
        The graph, for whichever plan runs.

    Raises:
        PlanMismatchError: if the plan does not know the graph and nothing of the call has run.
    """
    now = running_plan(identity)
    assert now is not None, "a plan runs"
    graph = replace(as_dynamo_made(copied(gm), inputs, "", gathered=False), inputs=())
    now.plan.compiled[graph] = now.plan.backend(gm, inputs)

    def run(*operands: Any) -> Any:
        running = running_plan(identity)
        if running is None:
            return graph.gm.forward(*operands)
        call = running.plan.compiled.get(graph)
        if call is None:
            with as_it_was(graph):
                fakes = _known_as_static(graph, operands)
                call = running.plan.backend(copied(graph.gm), operands)
            del fakes
            running.plan.compiled[graph] = call
        return call(*operands)

    return run


def _known_as_static(graph: DynamoGraph, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Fake tensors of the operands, with sizes that are numbers; AOTAutograd finds them while the caller holds them."""
    mode = None if graph.context is None else graph.context.fake_mode
    real = [value for value in inputs if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)]
    return [] if mode is None else [mode.from_tensor(value, static_shapes=True) for value in real]


_RUNNING: ContextVar[_Running | None] = ContextVar("memfit_running_plan", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A plan that runs a call which Dynamo compiled."""

    plan: RunsGraphs
    call: DynamoCall

    def run(self, graph: DynamoGraph, views: Views, inputs: Sequence[Any]) -> Any:
        """Runs a graph of the capture."""
        return self.plan.run(graph, views, inputs, self.call.traces.get(graph, ()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamoCall:
    """The call that Dynamo compiled for a capture.

    Attributes:
        model: the module that was captured.
        identity: by which the compiled code asks `running_plan`.
        call: takes the arguments of the module.
        decisions: branches that it was compiled for (`memfit.capture.values.decisions`).
        traces: of its graphs. Dynamo keeps what it was given for a graph behind a break as long as the code of the
            module, and traces hold parameters.
    """

    model: nn.Module
    identity: object
    call: Callable[..., Any]
    decisions: Sequence[Decision] = ()
    traces: Mapping[DynamoGraph, Sequence[Trace]] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> DynamoCall:
        return self  # the compiled code calls this module, not a copy

    def run(self, plan: RunsGraphs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the module, whose graph is run by a plan."""
        token = _RUNNING.set(_Running(plan=plan, call=self))
        try:
            return self.call(*args, **kwargs)
        finally:
            _RUNNING.reset(token)


def running_plan(identity: object) -> _Running | None:
    """The plan that runs a compiled call; None while the step is captured."""
    running = _RUNNING.get()
    return running if running is not None and running.call.identity is identity else None
