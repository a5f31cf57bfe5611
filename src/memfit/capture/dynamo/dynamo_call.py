"""A module's call that Dynamo compiled for a capture, and that the plans of this step run too.

A step is captured once, and then compiled for each plan that is tried: to measure it, to correct it, to train. Dynamo's
graphs and guards do not depend on the plan, and for many models Dynamo's tracing of the code takes longer than all
other work.

*Idea*: late binding. The function that Dynamo received for a graph looks up which plan runs the graph now: no plan
while the step is captured, otherwise a plan, which traces its own copy of the graph at its first run. Where the guards
fail, Dynamo traces the code again for the plan that runs; the next plan of the capture finds that graph and compiles it
for itself.

Known limits: the call holds the module. A sharded module is traced again, as its capture gathers its parameters. After
a graph break, a graph that the capture did not reach is compiled for the plan that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.dynamo.dynamo_graph import copied
from memfit.capture.dynamo.traced_graph import DynamoGraph, Trace, as_dynamo_made, as_it_was
from memfit.capture.gradients.returned_views import Views, calling_after
from memfit.capture.gradients.shared_inputs import static_example
from memfit.capture.values.decisions import Decision
from memfit.torch_compat.core import FakeTensor

__all__ = ["DynamoCall", "RunsGraphs", "made_while_running", "running_plan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunsGraphs:
    """The interface of a plan to the call that Dynamo compiled.

    Attributes:
        backend: compiles a graph that Dynamo made for this plan, as a Dynamo backend does.
        compile_graph: compiles a copy of a graph of the capture, given examples of its operands and the graph.
        compiled: the graphs of the capture that have been compiled.
    """

    backend: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    compile_graph: Callable[[fx.GraphModule, Sequence[Any], DynamoGraph], Callable[..., Any]]
    compiled: dict[DynamoGraph, Callable[..., Any]] = field(default_factory=dict)

    def run(self, graph: DynamoGraph, views: Views, inputs: Sequence[Any], traces: Sequence[Trace] = ()) -> Any:
        """Runs a graph of the capture; the first run compiles it, from one of its traces where a trace fits."""
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
    """Compiles a graph that Dynamo made while a plan runs, because a guard failed.

    Dynamo keeps the graph with the call, so other plans of the capture reach it too, and each plan compiles it for
    itself.

    Args:
        gm: the graph.
        inputs: example inputs.
        identity: identifies the call.

    Returns:
        A function that runs the graph for the plan that is running then.

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
    """Fake tensors of the operands, with static sizes; AOTAutograd finds these tensors while the caller holds them."""
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
        identity: the key with which the compiled code calls `running_plan`.
        call: takes the arguments of the module.
        decisions: branches that the call was compiled for (`memfit.capture.values.decisions`).
        traces: traces of its graphs. The function that Dynamo received for a graph must not hold them: Dynamo keeps the
            function of a graph after a break as long as the code of the module, and traces hold parameters.
        without_gradients: keys of the graphs that no gradient reaches. They run as plain code, and their memory is part
            of the prediction.
    """

    model: nn.Module
    identity: object
    call: Callable[..., Any]
    decisions: Sequence[Decision] = ()
    traces: Mapping[DynamoGraph, Sequence[Trace]] = field(default_factory=dict)
    without_gradients: Set[str] = frozenset()

    def __deepcopy__(self, memo: object) -> DynamoCall:
        return self  # the compiled code calls this module, not a copy

    def run(self, plan: RunsGraphs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the module; a plan runs its graphs."""
        token = _RUNNING.set(_Running(plan=plan, call=self))
        try:
            return self.call(*args, **kwargs)
        finally:
            _RUNNING.reset(token)


def running_plan(identity: object) -> _Running | None:
    """The plan that runs a compiled call; None while the step is captured."""
    running = _RUNNING.get()
    return running if running is not None and running.call.identity is identity else None
