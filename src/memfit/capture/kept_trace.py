"""The joint graph that AOTAutograd traced for a capture, kept for the plans of that step.

A step is traced when it is captured, and once more for each plan that is compiled. Both give the same joint graph:
a plan changes how the graph is cut in two, not the graph. Tracing takes most of the time of `fit`.

*Idea*: AOTAutograd works in two stages, as its export does (`aot_export_joint_with_descriptors`): it traces the joint
graph, then cuts and compiles it. What the first stage gave is kept, and AOTAutograd begins a plan with a copy of that.

Known limits: the functions of both stages are torch's own and may be named otherwise in another version; then nothing
is kept and each plan is traced.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch._functorch.aot_autograd as aot

from memfit.capture.dynamo_graph import copied

__all__ = ["KeptTrace", "keeping_trace", "taking_trace"]

_ANALYSE, _TRACE = "run_functionalized_fw_and_collect_metadata", "aot_stage1_graph_capture"
_ANALYSED, _PASSED_ON = "fw_metadata", ("flat_args", "flat_args_descs", "fw_metadata")
_GRAPH = "graph_module"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTrace:
    """What AOTAutograd knew of a graph when it had traced it.

    Attributes:
        analysed: what it had found out of inputs and outputs before.
        passed_on: what tracing changed in its state, by attributes.
        traced: the joint graph, with its inputs and the wrappers around it.
    """

    analysed: Any
    passed_on: dict[str, Any]
    traced: Any


@contextmanager
def keeping_trace(keep: Callable[[KeptTrace], None]) -> Iterator[None]:
    """While active, `keep` is called with each graph that AOTAutograd traces."""
    plain = getattr(aot, _TRACE, None)
    if plain is None or not hasattr(aot, _ANALYSE):
        yield
        return

    def trace(state: Any, *args: Any) -> Any:
        analysed = copy.copy(getattr(state, _ANALYSED))
        traced = plain(state, *args)
        passed_on = {name: copy.copy(getattr(state, name)) for name in _PASSED_ON}
        keep(KeptTrace(analysed=analysed, passed_on=passed_on, traced=_copied(traced)))
        return traced

    setattr(aot, _TRACE, trace)
    try:
        yield
    finally:
        setattr(aot, _TRACE, plain)


@contextmanager
def taking_trace(kept: KeptTrace | None) -> Iterator[None]:
    """While active, AOTAutograd takes a graph for traced, so that it only cuts and compiles it; nothing for None."""
    if kept is None:
        yield
        return
    known, plain, analyse = kept, getattr(aot, _TRACE), getattr(aot, _ANALYSE)

    def metadata(*inputs: Any) -> Any:
        return copy.copy(known.analysed)

    def trace(state: Any, *args: Any) -> Any:
        for name, value in known.passed_on.items():
            setattr(state, name, copy.copy(value))
        return _copied(known.traced)

    setattr(aot, _ANALYSE, lambda *args, **kwargs: metadata)
    setattr(aot, _TRACE, trace)
    try:
        yield
    finally:
        setattr(aot, _ANALYSE, analyse)
        setattr(aot, _TRACE, plain)


def _copied(traced: Any) -> Any:
    """The same with a graph of its own, as whoever reads a joint graph changes it."""
    return dataclasses.replace(traced, **{_GRAPH: copied(getattr(traced, _GRAPH))})
