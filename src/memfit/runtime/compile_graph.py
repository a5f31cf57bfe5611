"""Compiles the graphs that Dynamo makes of a module's call, so that each runs its subgraph's share of a program.

AOTAutograd traces the joint graph again, or goes on from the trace of the capture; the digest of the joint graph tells
which program it runs. A graph that runs several times in a step has one program for each run.

Known limits: a graph is known by its digest. Behind a graph break, a graph that was not planned runs as plain code, and
the record of its pass notes this.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from memfit.capture.dynamo.compiled_call import call_has_begun
from memfit.capture.dynamo.dynamo_graph import (
    accumulated_inputs,
    all_but,
    attach_outputs,
    detach_outputs,
    graph_key,
    reads_numbers,
)
from memfit.capture.dynamo.kept_trace import KeptTrace
from memfit.capture.dynamo.trace_joint import trace_joint
from memfit.capture.dynamo.traced_graph import DynamoGraph, Surroundings
from memfit.capture.eager.backward_autocast import planning_backward
from memfit.capture.eager.cast_weights import cast_once
from memfit.capture.gradients.gradient_reach import reached_by_autograd, reached_in_joint
from memfit.capture.gradients.returned_views import calling_after, returned_views_first
from memfit.capture.gradients.shared_inputs import (
    calling_with_each_once,
    repeated_places,
    return_each_term,
    taking_for_each_use,
    terms_of_inputs,
    uses_of_inputs,
)
from memfit.capture.gradients.tangents import strides_of_gradients
from memfit.capture.gradients.used_views import cut_views_without_gradients, hand_on_used_views
from memfit.capture.training_step import Capture
from memfit.capture.values.numpy_code import call_numpy, numbers_by_numpy
from memfit.errors import PlanMismatchError
from memfit.fxir.joint import JointReading
from memfit.fxir.refused import UnplannableGraphError
from memfit.fxir.user_lines import user_line
from memfit.ops.accumulation import Accumulate
from memfit.passes.pass_list import PassSettings
from memfit.passes.read_joint import read_joint
from memfit.runtime.boxed_call import boxed
from memfit.runtime.deferred_backward import Later
from memfit.runtime.grad_accumulation import accumulation
from memfit.runtime.loop.expanded_gradients import sum_as_arrived
from memfit.runtime.loop.forward_passes import CompiledSubgraph
from memfit.runtime.loop.pass_records import in_turn, noting_backward, noting_forward, straying
from memfit.runtime.loop.unused_outputs import whole_graph
from memfit.runtime.lowering import lower
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.runner import Runner
from memfit.runtime.subgraph_program import SubgraphProgram, reading_digest
from memfit.torch_compat.core import autocast_is_on

__all__ = ["Compilation", "backend", "compile_graph"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """A plan that is compiled for a module.

    Attributes:
        model: the module.
        capture: the captured step of the module.
        programs: the program of each subgraph.
        places: by digest of a joint graph, the subgraphs with such a graph, in the order in which they run.
        separated: names of the ops that a program computes separately.
        grid: the grid of tiles of the programs.
        swappers: by subgraph, what swaps its storages; None where nothing is swapped.
        in_autocast: whether the backward pass runs inside an autocast region.
        without_gradients: keys of graphs that no gradient reaches and that run as plain code; None if Dynamo traces the
            module's code anew, so that they are not known.
        describe: describes the plan, for an out-of-memory error.
        runner: makes lowered graphs callable.
        later: receives the second part of a backward pass, see `memfit.runtime.deferred_backward`.
    """

    model: nn.Module
    capture: Capture
    programs: Sequence[SubgraphProgram]
    places: Mapping[str, Sequence[int]]
    separated: frozenset[str]
    grid: tuple[int, ...]
    swappers: Sequence[Swapper | None]
    in_autocast: bool
    without_gradients: frozenset[str] | None
    describe: Callable[[], str]
    runner: Runner
    later: Later | None

    @property
    def in_subgraphs(self) -> bool:
        """Whether the graph may break."""
        return bool(self.capture.subgraphs.breaks)

    def name_of(self, value: Any) -> str:
        """The name of a parameter."""
        return next((name for name, parameter in self.model.named_parameters() if parameter is value), "an input")

    def unplanned(self, place: str) -> PlanMismatchError:
        """The error for a graph that was not planned."""
        told = f"{type(self.model).__name__} now runs a graph that was not planned{place}"
        return PlanMismatchError(f"{told}; plan or fit it anew, as it now is")


@dataclass(slots=True, kw_only=True)
class _Graph:
    """One of Dynamo's graphs while it is compiled.

    Attributes:
        gm: the graph; outputs that receive no gradient are detached.
        key: its key; empty if the graph does not break.
        inputs: examples of its inputs.
        is_last: whether it is the last one of the call.
        receive: outputs that receive gradients.
        cut: outputs that were detached.
        own_runs: places of the subgraphs that this graph runs.
        by_run: whether each run has a program of its own.
        strides: for each run, the strides of the gradients of outputs where they differ from those of the outputs.
        repeated: by place of an input, how often the graph takes it.
        uses: how often each input is used.
        taken: the graph that takes inputs once for each use.
        examples: examples of the inputs of that graph.
        by_autograd: for each input, the outputs whose gradients reach it.
        accumulated: inputs whose gradients are added up inside the step.
        casts: inputs that autocast casts once.
        digest: digest of the joint graph; empty until it is traced.
    """

    gm: fx.GraphModule
    key: str
    inputs: Sequence[Any]
    is_last: bool
    receive: frozenset[int] | None
    cut: Sequence[int]
    own_runs: Sequence[int]
    by_run: bool
    strides: Sequence[Any]
    repeated: Mapping[int, int]
    uses: Sequence[int]
    taken: fx.GraphModule
    examples: Sequence[Any]
    by_autograd: Sequence[frozenset[int]]
    accumulated: frozenset[int]
    casts: Any
    digest: str = ""


class _UnplannedGraphError(UnplannableGraphError):
    """A graph is not the planned one, or not the one planned for this run."""


def backend(of: Compilation, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph that Dynamo has just made, as a backend of `torch.compile`.

    Raises:
        PlanMismatchError: if it is not a planned graph, and the call can be stopped before any op runs.
    """
    if not of.in_subgraphs and reads_numbers(gm):
        if call_has_begun():  # behind a graph break
            return straying(gm.forward)
        raise of.unplanned(_begin(gm))
    numbers_by_numpy(gm)
    cut_views_without_gradients(gm)
    gm, inputs, views = returned_views_first(gm, inputs)
    hand_on_used_views(gm)
    return calling_after(views, compile_graph(of, gm, inputs, begun=call_has_begun()))


def compile_graph(
    of: Compilation,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    captured: DynamoGraph | None = None,
    *,
    begun: bool = False,
) -> Callable[..., Any]:
    """Compiles a graph for all its runs in a step.

    Args:
        of: the plan.
        gm: Dynamo's graph.
        inputs: examples of its inputs.
        captured: the graph as it was captured, with its traces; None if Dynamo made it anew.
        begun: whether ops of the call have run already, behind a graph break.

    Raises:
        PlanMismatchError: if it is not a planned graph, and no op has run yet.
    """
    graph = _as_captured(of, gm, inputs)
    try:
        runs = range(len(graph.own_runs) if graph.by_run else 1)
        made = {run: call for run in runs if (call := _planned(of, graph, run, captured)) is not None}
        if not made and of.capture.subgraphs.plain.loose:
            raise UnplannableGraphError("shapes depend on data")
    except UnplannableGraphError as error:
        if not of.in_subgraphs:
            raise
        call_numpy(gm)
        log.warning(
            "a graph of the model that was not planned runs as plain code (%s): %s",
            error,
            "; ".join(of.capture.subgraphs.plain.reasons),
        )
        return gm.forward
    if not made and (begun or (captured is not None and of.in_subgraphs)):
        call_numpy(gm)
        attach_outputs(gm, graph.cut)
        return straying(gm.forward)
    if not made:
        raise of.unplanned(_begin(gm))
    if graph.by_run:
        return in_turn(made, graph.key)
    # Runs of one program are counted together, also across graphs.
    made |= {run: _compiled(of, graph, run, captured) for run in range(1, len(of.places.get(graph.digest, ())))}
    return made[0] if len(made) == 1 else in_turn(made, graph.digest)


def _as_captured(of: Compilation, gm: fx.GraphModule, inputs: Sequence[Any]) -> _Graph:
    """The graph with the outputs, inputs and gradients that it had when it was captured."""
    capture, by_autograd = of.capture, reached_by_autograd(gm)
    key = graph_key(gm) if of.in_subgraphs else ""
    is_last = not of.in_subgraphs or key == capture.subgraphs.last_key
    receive = capture.gradient_outputs if is_last else all_but(gm, capture.cut_between.get(key, frozenset()))
    cut = detach_outputs(gm, receive)
    strides = capture.gradient_strides.get(key, ({},))
    repeated = capture.shared.get(key, {})
    uses = uses_of_inputs(gm)
    taken, examples = taking_for_each_use(gm, inputs, repeated)
    accumulates = any(program.accumulate for program in of.programs)
    return _Graph(
        gm=gm,
        key=key,
        inputs=inputs,
        is_last=is_last,
        receive=receive,
        cut=cut,
        own_runs=[place for place, other in enumerate(capture.subgraphs.subgraphs) if other.key == key],
        by_run=any(of_run != strides[0] for of_run in strides),
        strides=strides,
        repeated=repeated,
        uses=uses,
        taken=taken,
        examples=examples,
        by_autograd=[*by_autograd, *(by_autograd[place] for place in repeated_places(repeated))],
        accumulated=accumulated_inputs(inputs) if accumulates else frozenset(),
        casts=cast_once(gm, inputs),
    )


def _planned(of: Compilation, graph: _Graph, run: int, captured: DynamoGraph | None) -> Callable[..., Any] | None:
    """The compiled graph for one of its runs; None if the graph was not planned for it."""
    with contextlib.suppress(_UnplannedGraphError):
        return _compiled(of, graph, run, captured)
    return None


def _compiled(of: Compilation, graph: _Graph, run: int, captured: DynamoGraph | None) -> Callable[..., Any]:
    capture = of.capture
    autocast = of.in_autocast if autocast_is_on() else None
    subgraph = CompiledSubgraph(in_subgraphs=of.in_subgraphs, autocast=autocast)
    if graph.is_last:
        subgraph.assumed, subgraph.without_gradient = capture.assumed, capture.without_gradient
    subgraph.repeated = repeated_places(graph.repeated)
    strides = graph.strides[min(run, len(graph.strides) - 1)]
    around = Surroundings(receive=graph.receive, strides=strides, repeated=graph.repeated)
    with planning_backward(in_autocast=of.in_autocast):
        kept = captured.traced_in(around) if captured is not None else None
    known = None if kept is None else _known_reading(of, kept)
    # Some versions of AOTAutograd keep the function, and with it the model, among Dynamo's globals.
    split = [functools.partial(_partition, of, graph, run, subgraph, known)]
    # The compilers below are kept too, and must not hold the model.
    describe, runner, later = of.describe, of.runner, of.later

    def forward(lowered: fx.GraphModule, operands: Any) -> Callable[..., Any]:
        return boxed(lowered, describe, runner=runner, later=later)

    def backward(lowered: fx.GraphModule, operands: Any) -> Callable[..., Any]:
        return noting_backward(boxed(lowered, describe, runner=runner, later=later))

    with planning_backward(in_autocast=of.in_autocast):
        call = trace_joint(
            *(graph.taken, graph.examples),
            strides=strides,
            partition=lambda *joint, **rest: split[0](*joint, **rest),
            forward=forward,
            backward=backward,
            kept=kept,
        )
    split.clear()
    call = calling_with_each_once(call, graph.repeated)
    if graph.digest:
        return noting_forward(call, subgraph)
    seen = not of.in_subgraphs or of.without_gradients is None or graph.key in of.without_gradients
    return call if seen else straying(call)


def _known_reading(of: Compilation, kept: KeptTrace) -> JointReading | None:
    """The reading of the one graph of the step, if it was read from this trace."""
    if of.in_subgraphs or len(of.capture.subgraphs.subgraphs) != 1:
        return None
    (subgraph,) = of.capture.subgraphs.subgraphs
    trace = subgraph.trace
    if trace is None or trace.kept is None or trace.kept() is not kept or subgraph.reading.grid != of.grid:
        return None
    return subgraph.reading if subgraph.reading.separated == of.separated else None


def _partition(
    of: Compilation,
    graph: _Graph,
    run: int,
    subgraph: CompiledSubgraph,
    known: JointReading | None,
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    **rest: Any,
) -> Any:
    """Lowers a joint graph to the forward and the backward graph of its program; a partitioner of AOTAutograd."""
    terms = terms_of_inputs(joint, num_fwd_outputs, graph.uses)
    summed = terms.keys() - graph.repeated.keys() - graph.accumulated - frozenset(graph.casts)
    subgraph.summed = {place: of.name_of(graph.inputs[place]) for place in summed}
    subgraph.casts = bool(graph.casts)
    subgraph.uses = {place: graph.uses[place] for place in subgraph.summed}
    return_each_term(joint, num_fwd_outputs, graph.repeated)
    subgraph.reached = _reached(joint, num_fwd_outputs, graph.by_autograd)
    subgraph.lying = {place: s for place, s in strides_of_gradients(joint.graph).items() if len(s) > 1}
    reading = _read(of, graph, joint, num_fwd_outputs) if known is None else known
    graph.digest = reading_digest(reading)
    places = of.places.get(graph.digest, ())
    if not places or (graph.by_run and of.programs[graph.own_runs[run]].digest != graph.digest):
        raise _UnplannedGraphError("a graph was not planned")
    place = graph.own_runs[run] if graph.by_run else places[run]
    program = of.programs[place]
    is_settled = subgraph.autocast is None or of.in_subgraphs
    if graph.cut or subgraph.assumed or subgraph.uses or not is_settled:
        aligned = len(subgraph.reached) == len(graph.by_autograd)
        subgraph.whole = whole_graph(graph.gm, graph.cut, reading, aligned=aligned)
    forward, backward = lower(
        reading,
        program,
        swapper=of.swappers[place],
        adding={place: accumulation(graph.inputs[place]) for place in graph.accumulated},
    )
    subgraph.summed_as_arrived = sum_as_arrived(backward)
    return forward, backward


def _read(of: Compilation, graph: _Graph, joint: fx.GraphModule, num_forward_outputs: int) -> JointReading:
    settings = PassSettings(
        num_forward_outputs=num_forward_outputs,
        separate=of.separated.__contains__,
        grid=of.grid,
        as_made=any(program.accumulate is Accumulate.AS_MADE for program in of.programs),
        cast_once=graph.casts,
    )
    return read_joint(joint, settings, accumulated=graph.accumulated, replaced=of.capture.subgraphs.replaced)


def _begin(gm: fx.GraphModule) -> str:
    """The first line of user code in a graph, for messages."""
    lines = (user_line(node.stack_trace or "") for node in gm.graph.nodes)
    return next((f" (it begins at {line})" for line in lines if line), "")


def _reached(
    joint: fx.GraphModule, num_forward_outputs: int, by_autograd: Sequence[frozenset[int]]
) -> tuple[frozenset[int] | None, ...]:
    """For each input, the outputs whose gradients contribute to its gradient, by both readings; None where unknown."""
    in_joint = reached_in_joint(joint, num_forward_outputs)
    if len(in_joint) != len(by_autograd):  # AOTAutograd merged inputs
        return tuple(None for _ in in_joint)
    return tuple(None if a is None else a | b for a, b in zip(in_joint, by_autograd, strict=True))
