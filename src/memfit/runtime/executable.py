"""Runs a program: compiles the module's call so that each captured subgraph runs its share of it.

The backend given to Dynamo lowers each joint graph by the program of its subgraph (`memfit.runtime.subgraph_program`).
If Dynamo compiles any other graph (for example because the model's Python state changed), the plan does not run:
`PlanMismatchError` lets the caller plan anew.

Known limits: behind a graph break, earlier code of the call has already run. An unplanned graph there runs as plain
code, and the record of its pass notes this.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from memfit.capture.compiled_call import call_has_begun, compile_call
from memfit.capture.dynamo_call import DynamoCall, RunsGraphs
from memfit.capture.dynamo_graph import (
    accumulated_inputs,
    all_but,
    attach_outputs,
    detach_outputs,
    graph_key,
    reads_numbers,
)
from memfit.capture.eager.backward_autocast import backward_in_autocast, planning_backward
from memfit.capture.eager.cast_weights import cast_once
from memfit.capture.gradients.gradient_reach import reached_by_autograd, reached_in_joint
from memfit.capture.gradients.returned_views import calling_after, returned_views_first
from memfit.capture.gradients.shared_inputs import (
    SharedInputs,
    calling_with_each_once,
    repeated_places,
    return_each_term,
    taking_for_each_use,
    terms_of_inputs,
    uses_of_inputs,
)
from memfit.capture.gradients.tangents import GradientStrides, strides_of_gradients
from memfit.capture.gradients.used_views import hand_on_used_views
from memfit.capture.trace_joint import trace_joint
from memfit.capture.traced_graph import DynamoGraph, Surroundings
from memfit.capture.training_step import Capture, device_of
from memfit.capture.unplanned_parts import NOTHING_PLAIN, PlainParts
from memfit.capture.values.decisions import Decision
from memfit.capture.values.numpy_code import call_numpy, numbers_by_numpy
from memfit.errors import PlanMismatchError
from memfit.fxir.refused import UnplannableGraphError
from memfit.fxir.user_lines import user_line
from memfit.ir.program import Program
from memfit.ir.tiers import Tier
from memfit.ops.accumulation import Accumulate
from memfit.passes.read_joint import read_joint
from memfit.runtime.boxed_call import boxed
from memfit.runtime.deferred_backward import Later
from memfit.runtime.forward_passes import CompiledSubgraph, Pass
from memfit.runtime.grad_accumulation import accumulation
from memfit.runtime.lowering import lower
from memfit.runtime.offload.backend import SwapSpace
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.offload.spaces import open_spaces
from memfit.runtime.pass_records import noting_backward, noting_forward
from memfit.runtime.subgraph_program import SubgraphProgram, reading_digest, subgraph_programs
from memfit.runtime.unused_outputs import whole_graph
from memfit.torch_compat.compiler import Unsupported
from memfit.torch_compat.core import autocast_is_on

__all__ = ["PlannedCall", "compile_planned", "compile_program"]

log = logging.getLogger(__name__)

_PASS: ContextVar[Pass | None] = ContextVar("memfit_pass", default=None)
"""The forward pass that runs now."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The module's call under a plan.

    Attributes:
        run: the module's call; compiles on its first call.
        swappers: swappers of the subgraphs that swap.
        subgraphs: number of graphs that run by the plan.
        decisions: decided branches on inputs in the code that is compiled so far.
    """

    run: Callable[..., Any]
    swappers: tuple[Swapper, ...] = ()
    subgraphs: int = 1
    decisions: Sequence[Decision] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.recorded(Pass(), args, kwargs)

    def recorded(self, here: Pass, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the module; `here` records the subgraphs that ran, and how long the pass holds its saved storages."""
        token = _PASS.set(here)
        try:
            return self.run(*args, **kwargs)
        finally:
            _PASS.reset(token)

    def strayed(self, here: Pass) -> bool:
        """Whether a recorded pass ran other graphs than the planned ones."""
        return here.strayed or here.executed != self.subgraphs

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes swapped out and in so far."""
        return sum(s.out_bytes for s in self.swappers), sum(s.in_bytes for s in self.swappers)


def compile_program(
    model: nn.Module,
    capture: Capture,
    program: Program,
    *,
    describe: Callable[[], str] = str,
    later: Later | None = None,
) -> PlannedCall:
    """Compiles the module's call so that it runs a program of its captured step.

    Args:
        model: the module.
        capture: the captured step of the module.
        program: a checked program of that step.
        describe: describes the plan, for an out-of-memory error.
        later: list that receives the second part of a backward pass, see `memfit.runtime.deferred_backward`.

    Returns:
        See `compile_planned`.

    Raises:
        SwapError: if there is no room for the storages that the program swaps.
    """
    followed = capture.subgraphs.call
    spaces = open_spaces(capture.graph, program, device_of(model))
    programs = subgraph_programs(capture, program)
    return compile_planned(
        *(model, programs, capture.gradient_outputs),
        assumed=capture.assumed,
        without_gradient=capture.without_gradient,
        cut_between=capture.cut_between,
        decide=capture.decide,
        gradient_strides=capture.gradient_strides,
        keys=[subgraph.key for subgraph in capture.subgraphs.subgraphs],
        shared=capture.shared,
        last_key=capture.subgraphs.last_key,
        in_subgraphs=bool(capture.subgraphs.breaks),
        plain=capture.subgraphs.plain,
        replaced=capture.subgraphs.replaced,
        spaces=spaces,
        describe=describe,
        later=later,
        followed=followed if followed is not None and followed.model is model else None,
    )


def compile_planned(
    model: nn.Module,
    programs: Sequence[SubgraphProgram],
    gradient_outputs: frozenset[int] | None,
    *,
    assumed: frozenset[int] = frozenset(),
    without_gradient: frozenset[int] = frozenset(),
    cut_between: Mapping[str, frozenset[int]] | None = None,
    decide: bool = False,
    gradient_strides: GradientStrides | None = None,
    keys: Sequence[str] = (),
    shared: SharedInputs | None = None,
    last_key: str | None = None,
    in_subgraphs: bool = False,
    plain: PlainParts = NOTHING_PLAIN,
    replaced: bool = False,
    spaces: Mapping[Tier, SwapSpace] | None = None,
    describe: Callable[[], str] = str,
    later: Later | None = None,
    followed: DynamoCall | None = None,
) -> PlannedCall:
    """Compiles the module's call so that it runs a plan.

    Args:
        model: the module.
        programs: one for each subgraph.
        gradient_outputs: outputs of the last subgraph that receive gradients; None for all.
        assumed: those of them that may receive no gradient from the loop.
        without_gradient: outputs that were cut because they may receive no gradient from the loop.
        cut_between: outputs of earlier subgraphs that were cut, by the keys of their graphs.
        decide: whether branches on inputs are decided.
        gradient_strides: strides of the gradients of subgraph outputs, where they differ from those of the outputs.
        keys: the key of each subgraph's graph, in the order of the subgraphs.
        shared: inputs that subgraphs take once for each use (`memfit.capture.gradients.shared_inputs`).
        last_key: key of the last subgraph's graph.
        in_subgraphs: whether the graph may break.
        plain: parts of the model that stay plain code.
        replaced: whether the model's own checkpoints are left out.
        spaces: the tiers that the programs swap to.
        describe: describes the plan, for an out-of-memory error.
        later: see `compile_program`.
        followed: the call that Dynamo compiled for the capture; without it Dynamo traces the module's code anew.

    Returns:
        A callable with the signature of the module; compiles on its first call.

    Raises:
        PlanMismatchError: from the call, before any op runs, if the model is not the planned one.
    """
    swappers = [Swapper(p.slots, spaces or {}) if p.slots else None for p in programs]
    of_graph: dict[str, list[int]] = {}
    for place, program in enumerate(programs):
        of_graph.setdefault(program.digest, []).append(place)
    separated = frozenset[str]().union(*(p.separated for p in programs))
    grid = max((p.grid for p in programs), default=())

    in_autocast = backward_in_autocast()

    def named(value: Any) -> str:
        return next((name for name, parameter in model.named_parameters() if parameter is value), "an input")

    def unplanned(place: str) -> PlanMismatchError:
        told = f"{type(model).__name__} now runs a graph that was not planned{place}"
        return PlanMismatchError(f"{told}; plan or fit it anew, as it now is")

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not in_subgraphs and reads_numbers(gm):
            if call_has_begun():  # behind a graph break
                return _straying(gm.forward)
            raise unplanned(_begin(gm))
        numbers_by_numpy(gm)
        gm, inputs, views = returned_views_first(gm, inputs)
        hand_on_used_views(gm)
        return calling_after(views, compile_graph(gm, inputs, begun=call_has_begun()))

    def compile_graph(
        gm: fx.GraphModule, inputs: Sequence[Any], of: DynamoGraph | None = None, *, begun: bool = False
    ) -> Callable[..., Any]:
        by_autograd = reached_by_autograd(gm)
        key = graph_key(gm) if in_subgraphs else ""
        is_last = not in_subgraphs or key == last_key
        between = (cut_between or {}).get(key, frozenset())
        receive = gradient_outputs if is_last else all_but(gm, between)
        cut = detach_outputs(gm, receive)
        strides_of_runs = (gradient_strides or {}).get(key, ({},))
        own_runs = [place for place, other in enumerate(keys) if other == key]
        by_run = any(strides != strides_of_runs[0] for strides in strides_of_runs)
        repeated, uses = (shared or {}).get(key, {}), uses_of_inputs(gm)
        taken, examples = taking_for_each_use(gm, inputs, repeated)
        by_autograd += [by_autograd[place] for place in repeated_places(repeated)]
        accumulated = accumulated_inputs(inputs) if any(p.accumulate for p in programs) else frozenset[int]()
        casts = cast_once(gm, inputs)
        as_made = any(p.accumulate is Accumulate.AS_MADE for p in programs)
        adding = {place: accumulation(inputs[place]) for place in accumulated}

        digest = ""

        def partition(
            joint: fx.GraphModule,
            joint_inputs: Any,
            *,
            num_fwd_outputs: int,
            run: int,
            subgraph: CompiledSubgraph,
            **rest: Any,
        ) -> Any:
            nonlocal digest
            terms = terms_of_inputs(joint, num_fwd_outputs, uses)
            subgraph.summed = {
                p: named(inputs[p]) for p in terms.keys() - repeated.keys() - accumulated - frozenset(casts)
            }
            subgraph.casts = bool(casts)
            subgraph.uses = {place: uses[place] for place in subgraph.summed}
            return_each_term(joint, num_fwd_outputs, repeated)
            subgraph.reached = _reached(joint, num_fwd_outputs, by_autograd)
            subgraph.lying = {place: s for place, s in strides_of_gradients(joint.graph).items() if len(s) > 1}
            reading = read_joint(
                *(joint, num_fwd_outputs),
                separate=separated.__contains__,
                grid=grid,
                accumulated=accumulated,
                as_made=as_made,
                replaced=replaced,
                cast_once=casts,
            )
            digest = reading_digest(reading)
            if digest not in of_graph or (by_run and programs[own_runs[run]].digest != digest):
                raise _UnplannedGraphError("a graph was not planned")
            place = own_runs[run] if by_run else of_graph[digest][run]
            program, swapper = programs[place], swappers[place]
            if cut or subgraph.assumed or subgraph.uses or (subgraph.autocast is not None and not in_subgraphs):
                aligned = len(subgraph.reached) == len(by_autograd)
                subgraph.whole = whole_graph(gm, cut, reading, aligned=aligned)
            return lower(
                *(reading, program.forward, program.backward, program.kept),
                held=program.held,
                swapper=swapper,
                tier_resident=program.tier_resident,
                adding=adding,
                waits_until=program.waits_until,
            )

        def forward(lowered: fx.GraphModule, operands: Any) -> Callable[..., Any]:
            return boxed(lowered, describe, later)

        def backward(lowered: fx.GraphModule, operands: Any) -> Callable[..., Any]:
            return noting_backward(boxed(lowered, describe, later))

        def compiled(run: int) -> Callable[..., Any]:
            subgraph = CompiledSubgraph(in_subgraphs=in_subgraphs, autocast=in_autocast if autocast_is_on() else None)
            if is_last:
                subgraph.assumed, subgraph.without_gradient = assumed, without_gradient
            subgraph.repeated = repeated_places(repeated)
            strides = strides_of_runs[min(run, len(strides_of_runs) - 1)]
            around = Surroundings(receive=receive, strides=strides, repeated=repeated)
            # Some versions of AOTAutograd keep the function, and with it the model, among Dynamo's globals.
            split = [functools.partial(partition, run=run, subgraph=subgraph)]
            with planning_backward(in_autocast=in_autocast):
                kept = of.traced_in(around) if of is not None else None
                call = trace_joint(
                    *(taken, examples),
                    strides=strides,
                    partition=lambda *joint, **rest: split[0](*joint, **rest),
                    forward=forward,
                    backward=backward,
                    kept=kept,
                )
            split.clear()
            call = calling_with_each_once(call, repeated)
            if digest:
                return noting_forward(call, subgraph, _PASS.get)
            seen = not in_subgraphs or followed is None or key in followed.without_gradients
            return call if seen else _straying(call)

        def planned(run: int) -> Callable[..., Any] | None:
            with contextlib.suppress(_UnplannedGraphError):
                return compiled(run)
            return None

        try:
            runs = range(len(own_runs) if by_run else 1)
            made = {run: call for run in runs if (call := planned(run)) is not None}
            if not made and plain.loose:
                raise UnplannableGraphError("shapes depend on data")
        except UnplannableGraphError as error:
            if not in_subgraphs:
                raise
            call_numpy(gm)
            log.warning(
                "a graph of the model that was not planned runs as plain code (%s): %s", error, "; ".join(plain.reasons)
            )
            return gm.forward
        if not made and (begun or (of is not None and in_subgraphs)):
            call_numpy(gm)
            attach_outputs(gm, cut)
            return _straying(gm.forward)
        if not made:
            raise unplanned(_begin(gm))
        if by_run:
            return _in_turn(made, key)
        # Runs of one program are counted together, also across graphs.
        made |= {run: compiled(run) for run in range(1, len(of_graph.get(digest, ())))}
        return made[0] if len(made) == 1 else _in_turn(made, digest)

    used = tuple(swapper for swapper in swappers if swapper is not None)
    if followed is not None:
        plan = RunsGraphs(backend=backend, compile_graph=compile_graph)

        def run_followed(*args: Any, **kwargs: Any) -> Any:
            try:
                return followed.run(plan, args, kwargs)
            except Unsupported as error:  # the code has changed and would break the graph now
                if in_subgraphs:
                    raise
                reason = next(iter(str(error).splitlines()), "")
                raise unplanned(f", where the graph breaks ({reason})") from error

        return PlannedCall(run_followed, used, len(programs), followed.decisions)
    decisions = list[Decision]() if decide else None
    run = compile_call(model, backend, in_subgraphs=in_subgraphs, plain=plain, replaced=replaced, decisions=decisions)
    return PlannedCall(run, used, len(programs), () if decisions is None else decisions)


class _UnplannedGraphError(UnplannableGraphError):
    """A graph is not the planned one, or not the one planned for this run."""


def _begin(gm: fx.GraphModule) -> str:
    """The first line of user code in a graph, for messages."""
    lines = (user_line(node.stack_trace or "") for node in gm.graph.nodes)
    return next((f" (it begins at {line})" for line in lines if line), "")


def _straying(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call that marks its pass as strayed: its graph was not planned and runs as plain code."""

    def run(*operands: Any) -> Any:
        here = _PASS.get()
        if here is not None:
            here.strayed = True
        return call(*operands)

    return run


def _in_turn(variants: Mapping[int, Callable[..., Any]], counted: str) -> Callable[..., Any]:
    """Makes a call that runs the programs of all runs in turn, for a graph that runs several times in a step.

    Args:
        variants: compiled calls, by the number of the run.
        counted: name under which runs are counted: runs of this graph alone, or of all graphs with the same program.
    """

    def run(*operands: Any) -> Any:
        here = _PASS.get()
        turns = here.turns if here is not None else Counter[str]()
        turn = turns[counted]
        turns[counted] += 1
        nearest = turn if turn in variants else max(variants)
        return variants[nearest](*operands)

    return run


def _reached(
    joint: fx.GraphModule, num_forward_outputs: int, by_autograd: Sequence[frozenset[int]]
) -> tuple[frozenset[int] | None, ...]:
    """For each input, the outputs whose gradients contribute to its gradient, by both readings; None where unknown."""
    in_joint = reached_in_joint(joint, num_forward_outputs)
    if len(in_joint) != len(by_autograd):  # AOTAutograd merged inputs
        return tuple(None for _ in in_joint)
    return tuple(None if a is None else a | b for a, b in zip(in_joint, by_autograd, strict=True))
