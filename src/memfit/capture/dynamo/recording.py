"""Records the graphs that Dynamo makes of a captured call, and the subgraphs that run.

A graph is traced by AOTAutograd when Dynamo makes it, or after the loss is read, when all facts for the trace are
known. While the step is captured, a graph returns fake outputs or runs without saving activations; later a plan runs in
its place (`memfit.capture.dynamo.dynamo_call`).

Known limits: Dynamo keeps the function of a graph as long as the code of the module lives. So a recording holds neither
the module nor inputs, and it is emptied when the capture ends.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.distributed.fsdp import Gathered
from memfit.capture.dynamo.dynamo_call import made_while_running, running_plan
from memfit.capture.dynamo.dynamo_graph import graph_key, outputs_of, reads_numbers, returned_inputs, weights_made
from memfit.capture.dynamo.traced_graph import (
    DynamoGraph,
    Reader,
    Surroundings,
    Trace,
    Traced,
    as_dynamo_made,
    not_traced,
    trace,
)
from memfit.capture.failures import nothing_reached
from memfit.capture.gradients.returned_views import Views, calling_after, returned_views_first
from memfit.capture.gradients.tangents import Strides, strides_of_outputs
from memfit.capture.gradients.used_views import cut_views_without_gradients, hand_on_used_views
from memfit.capture.subgraph_boundaries import Handed, handed_over, has_tensor_hooks, without_tensor_hooks
from memfit.capture.subgraphs import Subgraph
from memfit.capture.values.numpy_code import numbers_by_numpy, refuse_rounding_numpy
from memfit.fxir.module_names import name_modules
from memfit.fxir.refused import UnplannableGraphError
from memfit.torch_compat.core import FakeTensorMode

__all__ = ["Recording", "Source", "ready_to_trace", "record_graph", "record_ready"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """The module whose call is captured, and how.

    Attributes:
        model: the module.
        reader: how joint graphs are read.
        held: identities of its parameters and buffers.
        is_read: whether the loss is read after the call.
    """

    model: nn.Module
    reader: Reader
    held: frozenset[int]
    is_read: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """The graphs of a captured call.

    Attributes:
        fake_mode: makes the fake outputs.
        fake: whether graphs return fake outputs; otherwise they run.
        gathered: returns the units of a sharded module that are gathered now.
        subgraphs: the subgraphs that ran, in their order.
        graphs: the graphs that Dynamo made.
        runs: for each subgraph the number of its graph.
        traces: the traces of each graph.
        lying: by place of an output, its strides, where a trace knows those of the kernels.
        without_gradients: keys of the graphs that no gradient reaches; they run as plain code.
    """

    fake_mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    fake: bool
    gathered: Callable[[], tuple[Gathered, ...]]
    subgraphs: list[Subgraph] = field(default_factory=list)
    graphs: list[DynamoGraph] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    traces: dict[DynamoGraph, list[Trace]] = field(default_factory=dict)
    lying: dict[int, Strides] = field(default_factory=dict)
    without_gradients: set[str] = field(default_factory=set)

    def sources(self) -> tuple[DynamoGraph, ...]:
        """The graph of each subgraph."""
        return tuple(self.graphs[number] for number in self.runs)

    def clear(self) -> None:
        """Drops graphs, subgraphs and traces."""
        self.subgraphs.clear()
        self.graphs.clear()
        self.traces.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Recorded:
    """A graph as it runs while the step is captured.

    Attributes:
        number: its number among the graphs.
        bare: the graph without inputs and traces.
        views: makes views of inputs that the graph takes in addition.
        results: fake tensors of its outputs.
        run: runs the graph.
        traced: its trace.
        gm: the graph.
        weights: places of the inputs that are made of weights.
    """

    number: int
    bare: DynamoGraph
    views: Views
    results: Sequence[Any]
    run: Callable[..., Any]
    traced: Traced
    gm: fx.GraphModule
    weights: frozenset[int]


def record_graph(into: Recording, of: Source, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Traces a graph that Dynamo has just made, as a backend of `torch.compile`; its runs are recorded.

    Raises:
        UnplannableGraphError: if it cannot be planned, and the graph must not break.
        CaptureError: if no gradient reaches it, and the graph must not break.
    """
    if running_plan(into) is not None:
        return made_while_running(gm, inputs, into)
    gm, inputs, views = ready_to_trace(gm, inputs, of.model)
    key = "" if into.fake else graph_key(gm)
    graph = as_dynamo_made(gm, inputs, key, gathered=bool(into.gathered()))
    if into.fake and reads_numbers(gm):
        raise UnplannableGraphError("a number is read from a tensor")
    results = [n.meta["example_value"] if isinstance(n, fx.Node) else n for n in outputs_of(gm)]
    return record_ready(into, of, graph, views, results)


def ready_to_trace(
    gm: fx.GraphModule, inputs: Sequence[Any], model: nn.Module
) -> tuple[fx.GraphModule, Sequence[Any], Views]:
    """Prepares a graph that Dynamo has just made for tracing.

    Args:
        gm: the graph, which may be changed.
        inputs: examples of its inputs.
        model: the module that was called.

    Returns:
        The graph, examples of its inputs, and what makes the views that it takes in addition.

    Raises:
        UnplannableGraphError: if it cannot be planned.
    """
    numbers_by_numpy(gm)
    refuse_rounding_numpy(gm.graph)
    name_modules(gm.graph, model)
    cut_views_without_gradients(gm)
    gm, inputs, views = returned_views_first(gm, inputs)
    hand_on_used_views(gm)
    return gm, inputs, views


def record_ready(
    into: Recording, of: Source, graph: DynamoGraph, views: Views, results: Sequence[Any]
) -> Callable[..., Any]:
    """Traces a graph that is ready; its runs are recorded.

    Args:
        into: the recording.
        of: the module whose call is captured.
        graph: the graph, with examples of its inputs.
        views: makes views of inputs that the graph takes in addition.
        results: fake tensors like its outputs.

    Raises:
        UnplannableGraphError: if it cannot be planned, and the graph must not break.
        CaptureError: if no gradient reaches it, and the graph must not break.
    """
    gm, inputs, key = graph.gm, graph.inputs, graph.key
    later = into.fake and of.is_read  # one graph is traced after the loss is read, when all facts are known
    if later and not any(isinstance(r, torch.Tensor) and r.requires_grad for r in results):
        raise nothing_reached(of.model)
    original = _runnable(gm, fake=into.fake)
    try:
        traced = not_traced(gm) if later else trace(graph, Surroundings(), of.reader, keep=of.is_read)
    except UnplannableGraphError as error:
        if into.fake:
            raise
        log.warning("%s: the graph around it runs as plain code", error)
        return calling_after(views, gm.forward)
    if traced is None:
        if into.fake:
            raise nothing_reached(of.model)
        into.without_gradients.add(key)
        return calling_after(views, gm.forward)
    bare = replace(graph, inputs=(), traces=[], at_sizes=None)
    recorded = _Recorded(
        number=len(into.graphs),
        bare=bare,
        views=views,
        results=results,
        run=original,
        traced=traced,
        gm=gm,
        weights=weights_made(gm, inputs, of.held),
    )
    into.graphs.append(graph)
    into.traces[bare] = graph.traces
    if not later:
        into.lying.update(strides_of_outputs(traced.reading.module.graph))
    del graph  # Dynamo keeps the function below, which must not hold the inputs

    def run(*operands: Any) -> Any:
        return _run(into, recorded, operands)

    return run


def _runnable(gm: fx.GraphModule, *, fake: bool) -> Callable[..., Any]:
    if fake:
        return gm.forward
    if has_tensor_hooks(gm):
        forward: Callable[..., Any] = without_tensor_hooks(gm).forward
        return forward
    return types.MethodType(type(gm).forward, gm)


def _run(into: Recording, graph: _Recorded, inputs: tuple[Any, ...]) -> Any:
    """Runs a graph: by a plan if one runs the call, else for the recording."""
    plan = running_plan(into)
    if plan is not None:
        return plan.run(graph.bare, graph.views, inputs)
    units = into.gathered()
    operands = (*inputs, *graph.views(*inputs))
    if into.fake:
        twins = (_twin(r, into.fake_mode, into.lying.get(p)) for p, r in enumerate(graph.results))
        handed = Handed(outputs=tuple(twins))
    else:
        with torch.no_grad():
            made = graph.run(*operands)
        handed = handed_over(made, graph.results, () if units else operands, graph.traced.of_inputs)
    into.runs.append(graph.number)
    into.subgraphs.append(
        Subgraph(
            trace=graph.traced.trace,
            reading=graph.traced.reading,
            inputs=operands,
            handed=handed,
            gathered=units,
            key=graph.bare.key,
            terms=graph.traced.terms,
            returned=returned_inputs(graph.gm),
            weights=graph.weights,
        )
    )
    return handed.outputs


def _twin(value: Any, fake_mode: FakeTensorMode, strides: Strides | None) -> Any:
    """A leaf fake tensor with the metadata of Dynamo's, but the kernels' strides, which Dynamo does not ask for."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        strides = value.stride() if strides is None else strides
        twin = torch.empty_strided(tuple(value.shape), strides, dtype=value.dtype, device=value.device)
    return twin.requires_grad_(value.requires_grad)
