"""One Dynamo graph, traced by AOTAutograd: once, and again when more is known about the step around the graph.

The backward pass of a graph depends on the code after the graph: which outputs receive a gradient, which strides that
gradient has, which inputs later code uses too. These facts are known only when the whole forward pass was captured.
Dynamo's part of the work, following the code, does not depend on these facts and takes most of the time.

*Idea*: the graph is kept as Dynamo made it, and a copy is traced again with the facts known by then. The joint graph
that was traced last is kept too: the way it is read (in tiles, gradients part by part) does not change the trace.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memfit.capture.dynamo.dynamo_graph import accumulated_inputs, copied, detach_outputs, in_place_nodes
from memfit.capture.dynamo.kept_trace import KeptTrace
from memfit.capture.dynamo.trace_joint import hand_over_joint
from memfit.capture.eager.backward_autocast import backward_in_autocast
from memfit.capture.eager.cast_weights import cast_once
from memfit.capture.eager.compiler_queries import eager_answers
from memfit.capture.eager.fake_kernels import rules_of_kernels
from memfit.capture.gradients.shared_inputs import (
    return_each_term,
    taking_for_each_use,
    terms_of_inputs,
    uses_of_inputs,
)
from memfit.capture.gradients.tangents import Strides, strides_of_input_gradients
from memfit.fxir.joint import JointReading
from memfit.ops.accumulation import Accumulate
from memfit.passes.pass_list import PassSettings
from memfit.passes.read_baseline import read_baseline
from memfit.passes.read_joint import read_joint
from memfit.torch_compat.core import FakeTensorMode, TracingContext, tracing

__all__ = [
    "DynamoGraph",
    "JointTrace",
    "Reader",
    "Surroundings",
    "Trace",
    "Traced",
    "as_dynamo_made",
    "as_it_was",
    "not_traced",
    "trace",
    "trace_with_symbols",
]

_DEVICES = ("cpu", "cuda", "xpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How joint graphs are read, see `memfit.passes.read_joint.read_joint`.

    Attributes:
        separate: tells which gradients are computed part by part.
        grid: numbers of tiles, for the lever `tile`.
        accumulate: how gradients are added to `.grad` inside the graph; None if autograd adds them.
        replaced: whether the model's own checkpoints are left out.
    """

    separate: Callable[[str], bool]
    grid: tuple[int, ...] = ()
    accumulate: Accumulate | None = None
    replaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Uses of a graph in the step around it: outputs that receive gradients, and inputs taken several times.

    Attributes:
        receive: places of the outputs that receive a gradient; None for all.
        strides: by place of an output, the strides of its gradient, where they differ from those of the output.
        repeated: by place of an input, how often the graph takes it (`memfit.capture.gradients.shared_inputs`).
    """

    receive: frozenset[int] | None = None
    strides: Mapping[int, Strides] = field(default_factory=dict)
    repeated: Mapping[int, int] = field(default_factory=dict)


Trace = tuple[Surroundings, bool, KeptTrace]
"""A traced copy of a graph, with its surroundings and whether backward passes are inside autocast regions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DynamoGraph:
    """A graph as Dynamo made it, and the settings under which Dynamo made it.

    Attributes:
        gm: the graph, which tracing does not change.
        inputs: example inputs.
        key: key of the graph (`memfit.capture.dynamo.dynamo_graph.graph_key`); empty for the only graph.
        gathered: whether units of a sharded module were gathered.
        context: tracing context with the fake tensors: Dynamo's, or a new one if Dynamo did not make the graph.
        grad: whether gradients were recorded.
        autocast: the autocast dtype by device type, for the device types with autocast on.
        traces: traces of copies of the graph.
        at_sizes: makes the trace for some surroundings from one with symbols for sizes; None if there is none.
    """

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    key: str
    gathered: bool
    context: TracingContext
    grad: bool
    autocast: Mapping[str, torch.dtype]
    traces: list[Trace] = field(default_factory=list)
    at_sizes: Callable[[Surroundings], KeptTrace | None] | None = None

    def traced_in(self, around: Surroundings) -> KeptTrace | None:
        """The joint graph for these surroundings and the current autocast mode of backward passes, if kept."""
        now = around, backward_in_autocast()
        return next((trace for *then, trace in self.traces if tuple(then) == now), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointTrace:
    """A joint graph as AOTAutograd traced it, and further data needed to read it.

    Attributes:
        joint: the joint graph; reading it rewrites a copy.
        num_forward_outputs: how many of its outputs belong to the forward pass.
        graph: Dynamo's graph that it was traced from, without examples.
        kept: refers to the trace that the joint graph is a copy of, if that is kept.
        in_place: nodes of Dynamo's graph that overwrite their operand.
        accumulated: inputs whose gradients the graph adds to the existing gradients.
        cast_once: inputs that autocast casts once.
        reader: how the joint graph is read.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    graph: DynamoGraph
    kept: weakref.ref[KeptTrace] | None
    in_place: frozenset[str]
    accumulated: frozenset[int]
    cast_once: frozenset[int]
    reader: Reader

    def read(self) -> JointReading:
        """Ops and storages of the joint graph.

        Raises:
            UnplannableGraphError: if it cannot be planned.
        """
        with as_it_was(self.graph):  # results of new nodes get the kernels' strides, without autocast around `fit`
            return read_joint(
                copied(self.joint), self._settings(), accumulated=self.accumulated, replaced=self.reader.replaced
            )

    def read_baseline(self) -> JointReading:
        """Ops and storages of the step without memfit."""
        with as_it_was(self.graph):
            return read_baseline(
                copied(self.joint), self._settings(), in_place=self.in_place, accumulated=self.accumulated
            )

    def _settings(self) -> PassSettings:
        return PassSettings(
            num_forward_outputs=self.num_forward_outputs,
            separate=self.reader.separate,
            grid=self.reader.grid,
            as_made=self.reader.accumulate is Accumulate.AS_MADE,
            cast_once=self.cast_once,
        )

    def read_in_other_way(self, *, separate: Callable[[str], bool], grid: tuple[int, ...]) -> JointTrace:
        """The same joint graph, with another way to read it."""
        return replace(self, reader=replace(self.reader, separate=separate, grid=grid))

    def __deepcopy__(self, memo: object) -> JointTrace:
        return self  # it is never changed, and its nodes hold fake tensors of one mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Result of tracing: the joint graph, and the terms and strides of the gradients of its inputs.

    Attributes:
        trace: the joint graph; None where it is not traced yet.
        reading: ops and storages read from the joint graph.
        terms: by place of an input, the number of terms that its gradient is the sum of, where there are several.
        of_inputs: by place of an input that receives a gradient, the strides of the gradient; None where unknown.
    """

    trace: JointTrace | None
    reading: JointReading
    terms: Mapping[int, int]
    of_inputs: Mapping[int, Strides | None]


def not_traced(gm: fx.GraphModule) -> Traced:
    """An empty result, which stands for the real one while tracing waits for the surroundings of the graph."""
    nothing = JointReading(
        module=gm, num_forward_outputs=0, ops=(), storages=(), storage_of={}, output_storages=(), gradient_storages=()
    )
    return Traced(trace=None, reading=nothing, terms={}, of_inputs={})


def as_dynamo_made(gm: fx.GraphModule, inputs: Sequence[Any], key: str, *, gathered: bool) -> DynamoGraph:
    """Keeps a graph and the current settings; called where Dynamo hands the graph over."""
    devices = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    return DynamoGraph(
        gm=gm,
        inputs=tuple(inputs),
        key=key,
        gathered=gathered,
        context=TracingContext.try_get() or TracingContext(FakeTensorMode()),
        grad=torch.is_grad_enabled(),
        autocast={device: torch.get_autocast_dtype(device) for device in devices},
    )


def trace(graph: DynamoGraph, around: Surroundings, reader: Reader, *, keep: bool = False) -> Traced | None:
    """Traces a copy of a graph and its backward pass; None if no gradient reaches it.

    Args:
        graph: the graph, as Dynamo made it.
        around: uses of the graph in the step.
        reader: how the joint graph is read.
        keep: whether the trace is kept with the graph.

    Raises:
        UnplannableGraphError: if it cannot be planned.
    """
    traced: list[Traced] = []
    kept: list[KeptTrace] = []
    gm = copied(graph.gm)
    accumulated = accumulated_inputs(graph.inputs) if reader.accumulate else frozenset[int]()
    casts = cast_once(gm, graph.inputs)
    without = accumulated | casts  # eager adds up gradients of a cast weight before it casts them back
    detach_outputs(gm, around.receive)
    uses = uses_of_inputs(gm)
    in_place = in_place_nodes(gm)

    def read(joint: fx.GraphModule, num_forward_outputs: int) -> None:
        terms = {} if graph.gathered else terms_of_inputs(joint, num_forward_outputs, uses)
        return_each_term(joint, num_forward_outputs, around.repeated)
        trace = JointTrace(
            joint=joint,
            num_forward_outputs=num_forward_outputs,
            graph=replace(graph, inputs=(), traces=[], at_sizes=None),
            kept=weakref.ref(kept[0]) if kept else None,
            in_place=in_place,
            accumulated=accumulated,
            cast_once=casts,
            reader=reader,
        )
        traced.append(
            Traced(
                trace=trace,
                reading=trace.read(),
                terms={place: number for place, number in terms.items() if place not in without},
                of_inputs=strides_of_input_gradients(joint.graph),
            )
        )

    def note(trace: KeptTrace) -> None:
        kept.append(trace)
        graph.traces.append((around, backward_in_autocast(), trace))

    known = graph.at_sizes(around) if graph.at_sizes is not None else None
    with as_it_was(graph):
        if known is not None:
            note(known)
            read(known.joint(), known.num_forward_outputs)
        else:
            taken, examples = taking_for_each_use(gm, graph.inputs, around.repeated)
            hand_over_joint(taken, examples, strides=around.strides, read=read, keep=note if keep else None)
    return traced[0] if traced else None


def trace_with_symbols(graph: DynamoGraph, around: Surroundings) -> KeptTrace | None:
    """The trace of a graph whose inputs are fake tensors with symbols for sizes; None if no gradient reaches it."""
    found: list[KeptTrace] = []
    numbers: list[int] = []
    gm = copied(graph.gm)
    detach_outputs(gm, around.receive)
    with as_it_was(graph):
        taken, examples = taking_for_each_use(gm, graph.inputs, around.repeated)
        hand_over_joint(
            *(taken, examples), strides=around.strides, read=lambda _, number: numbers.append(number), keep=found.append
        )
    return replace(found[0], num_forward_outputs=numbers[0]) if numbers else None


@contextlib.contextmanager
def as_it_was(graph: DynamoGraph) -> Iterator[None]:
    """Restores the settings with which Dynamo handed the graph over; does nothing while that call lasts."""
    if TracingContext.try_get() is graph.context:
        yield
        return
    with contextlib.ExitStack() as around:
        around.enter_context(torch.set_grad_enabled(graph.grad))
        for device in _DEVICES:
            dtype = graph.autocast.get(device)
            if dtype is not None or torch.is_autocast_enabled(device):
                around.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
        around.enter_context(eager_answers())
        around.enter_context(rules_of_kernels())
        around.enter_context(tracing(graph.context))
        yield
