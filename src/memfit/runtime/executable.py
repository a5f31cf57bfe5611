"""Runs a program: compiles the module's call so that each captured subgraph runs its share of it.

The backend given to Dynamo lowers each joint graph by the program of its subgraph (`memfit.runtime.subgraph_program`).
If Dynamo compiles any other graph (for example because the model's Python state changed), the plan does not run:
`PlanMismatchError` lets the caller plan anew.

Known limits: behind a graph break, earlier code of the call has already run. An unplanned graph there runs as plain
code, and the record of its pass notes this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from memfit.capture.call_settings import CallSettings
from memfit.capture.dynamo.dynamo_call import DynamoCall, RunsGraphs
from memfit.capture.eager.backward_autocast import backward_in_autocast
from memfit.capture.frontend import frontend_of
from memfit.capture.training_step import Capture, device_of
from memfit.capture.values.decisions import Decision
from memfit.ir.program import Program
from memfit.runtime.compile_graph import Compilation, backend, compile_graph
from memfit.runtime.deferred_backward import Later
from memfit.runtime.loop.forward_passes import CURRENT_PASS, Pass
from memfit.runtime.offload.engine import Swapper
from memfit.runtime.offload.spaces import open_spaces
from memfit.runtime.runner import Runner, run_by_fx
from memfit.runtime.subgraph_program import subgraph_programs
from memfit.torch_compat.compiler import Unsupported

__all__ = ["PlannedCall", "compile_program"]


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
        token = CURRENT_PASS.set(here)
        try:
            return self.run(*args, **kwargs)
        finally:
            CURRENT_PASS.reset(token)

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
    runner: Runner = run_by_fx,
) -> PlannedCall:
    """Compiles the module's call so that it runs a program of its captured step.

    Args:
        model: the module.
        capture: the captured step of the module.
        program: a checked program of that step.
        describe: describes the plan, for an out-of-memory error.
        later: list that receives the second part of a backward pass, see `memfit.runtime.deferred_backward`.
        runner: makes the lowered graphs callable.

    Returns:
        A callable with the signature of the module; compiles on its first call, or runs the graphs that Dynamo compiled
        for the capture.

    Raises:
        SwapError: if there is no room for the storages that the program swaps.
        PlanMismatchError: from the call, before any op runs, if the model is not the planned one.
    """
    followed = capture.subgraphs.call
    if followed is not None and followed.model is not model:
        followed = None
    spaces = open_spaces(capture.graph, program, device_of(model))
    programs = subgraph_programs(capture, program)
    swappers = [Swapper(p.slots, spaces) if p.slots else None for p in programs]
    places: dict[str, list[int]] = {}
    for place, of_subgraph in enumerate(programs):
        places.setdefault(of_subgraph.digest, []).append(place)
    made = Compilation(
        model=model,
        capture=capture,
        programs=programs,
        places=places,
        separated=frozenset[str]().union(*(p.separated for p in programs)),
        grid=max((p.grid for p in programs), default=()),
        swappers=swappers,
        in_autocast=backward_in_autocast(),
        without_gradients=None if followed is None else frozenset(followed.without_gradients),
        describe=describe,
        runner=runner,
        later=later,
    )
    used = tuple(swapper for swapper in swappers if swapper is not None)
    if followed is not None:
        run, decisions = _through(made, followed), followed.decisions
    else:
        run, decisions = _traced_anew(made)
    return PlannedCall(run, used, len(programs), decisions)


def _through(made: Compilation, followed: DynamoCall) -> Callable[..., Any]:
    """The call that Dynamo compiled for the capture, which runs the plan's graphs."""
    plan = RunsGraphs(
        backend=functools.partial(backend, made),
        compile_graph=functools.partial(compile_graph, made),
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return followed.run(plan, args, kwargs)
        except Unsupported as error:  # the code has changed and would break the graph now
            if made.in_subgraphs:
                raise
            reason = next(iter(str(error).splitlines()), "")
            raise made.unplanned(f", where the graph breaks ({reason})") from error

    return run


def _traced_anew(made: Compilation) -> tuple[Callable[..., Any], Sequence[Decision]]:
    """A call that Dynamo compiles at its first run, and the branches on inputs that it then decides."""
    capture, decisions = made.capture, list[Decision]()
    settings = CallSettings(
        in_subgraphs=made.in_subgraphs,
        plain=capture.subgraphs.plain,
        replaced=capture.subgraphs.replaced,
        decisions=decisions if capture.decide else None,
    )
    return frontend_of(made.model)(made.model, functools.partial(backend, made), settings), decisions
