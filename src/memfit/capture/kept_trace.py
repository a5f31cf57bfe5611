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

__all__ = ["KeptTrace", "traced_once"]

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
def traced_once(*, kept: KeptTrace | None = None, keep: Callable[[KeptTrace], None] | None = None) -> Iterator[None]:
    """While active, AOTAutograd cuts and compiles copies of the graphs that it traces.

    Copies number new nodes otherwise than the graph itself does, so that all are copies, whether they are kept or not.

    Args:
        kept: is taken in place of what would be traced.
        keep: is called with what is traced.
    """
    trace, analyse = getattr(aot, _TRACE, None), getattr(aot, _ANALYSE, None)
    if trace is None or analyse is None:
        yield
        return

    def copy_of_trace(state: Any, *args: Any) -> Any:
        if kept is not None:
            for name, value in kept.passed_on.items():
                setattr(state, name, copy.copy(value))
            return _copied(kept.traced)
        analysed = copy.copy(getattr(state, _ANALYSED))
        traced = trace(state, *args)
        if keep is not None:
            passed_on = {name: copy.copy(getattr(state, name)) for name in _PASSED_ON}
            keep(KeptTrace(analysed=analysed, passed_on=passed_on, traced=traced))
        return _copied(traced)

    setattr(aot, _TRACE, copy_of_trace)
    if kept is not None:
        setattr(aot, _ANALYSE, lambda *args, **kwargs: lambda *inputs: copy.copy(kept.analysed))
    try:
        yield
    finally:
        setattr(aot, _TRACE, trace)
        setattr(aot, _ANALYSE, analyse)


def _copied(traced: Any) -> Any:
    """The same with a graph of its own, as whoever reads a joint graph changes it."""
    return dataclasses.replace(traced, **{_GRAPH: copied(getattr(traced, _GRAPH))})
