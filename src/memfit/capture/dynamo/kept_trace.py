"""The joint graph that AOTAutograd traced for a capture, kept for the plans of that step.

A step is traced when it is captured, and once more for each plan that is compiled. Both traces give the same joint
graph: a plan changes how the graph is cut in two, not the graph. Tracing takes most of the time of `fit`.

*Idea*: AOTAutograd works in two stages, as its export does (`aot_export_joint_with_descriptors`): it traces the joint
graph, then cuts and compiles it. The result of the first stage is kept, and a plan goes through the second stage only,
with a copy of that result.

Known limits: the functions of both stages are torch's own and may have other names in another version; then no trace is
kept and each plan is traced.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from memfit.capture.dynamo.dynamo_graph import copied
from memfit.torch_compat.compiler import aot

__all__ = ["KeptTrace", "traced_once"]

_ANALYSE, _TRACE = "run_functionalized_fw_and_collect_metadata", "aot_stage1_graph_capture"
_ANALYSED, _FLAT = "fw_metadata", "flat_args"
_PASSED_ON = (_FLAT, "flat_args_descs", _ANALYSED)
_GRAPH, _INPUTS = "graph_module", "updated_flat_args"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class KeptTrace:
    """The result of AOTAutograd's first stage for a graph.

    Attributes:
        analysed: the analysis of inputs and outputs that tracing began with, a `ViewAndMutationMeta`.
        passed_on: attributes of AOTAutograd's state that tracing changed, by name.
        traced: an `AOTGraphCapture`: the joint graph, its inputs and the wrappers around it.
        num_forward_outputs: number of outputs of the joint graph that belong to the forward pass, where that is known.
    """

    analysed: Any
    passed_on: dict[str, Any]
    traced: Any
    num_forward_outputs: int = 0

    def joint(self) -> fx.GraphModule:
        """A copy of the joint graph."""
        return copied(getattr(self.traced, _GRAPH))

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the graph, as fake tensors."""
        return list(self.passed_on[_FLAT])


@contextmanager
def traced_once(*, kept: KeptTrace | None = None, keep: Callable[[KeptTrace], None] | None = None) -> Iterator[None]:
    """While active, AOTAutograd cuts and compiles a copy of the one graph that it traces.

    A copy numbers new nodes differently than the traced graph does, and plans refer to nodes by name. So every joint
    graph is a copy, whether its trace was kept or not.

    Args:
        kept: a kept trace, which replaces tracing.
        keep: is called with the result of tracing.
    """
    trace, analyse = getattr(aot, _TRACE, None), getattr(aot, _ANALYSE, None)
    if trace is None or analyse is None:
        yield
        return

    def restore() -> None:
        setattr(aot, _TRACE, trace)
        setattr(aot, _ANALYSE, analyse)

    def copy_of_trace(state: Any, *args: Any) -> Any:
        restore()  # compiling may trace other graphs
        if kept is not None:
            for name, value in kept.passed_on.items():
                setattr(state, name, _with_own_containers(value))
            return _copied(kept.traced)
        analysed = _with_own_containers(getattr(state, _ANALYSED))
        traced = trace(state, *args)
        if keep is not None:
            passed_on = {name: _with_own_containers(getattr(state, name)) for name in _PASSED_ON}
            keep(KeptTrace(analysed=analysed, passed_on=passed_on, traced=traced))
        return _copied(traced)

    setattr(aot, _TRACE, copy_of_trace)
    if kept is not None:
        setattr(aot, _ANALYSE, lambda *args, **kwargs: lambda *inputs: _with_own_containers(kept.analysed))
    try:
        yield
    finally:
        restore()


def _copied(traced: Any) -> Any:
    """The same trace with its own copies of graph and inputs, as cutting and compiling change them."""
    inputs = getattr(traced, _INPUTS)
    inputs = type(inputs)(copy.copy(part) if isinstance(part, list) else part for part in inputs)
    return dataclasses.replace(traced, **{_GRAPH: copied(getattr(traced, _GRAPH)), _INPUTS: inputs})


def _with_own_containers(value: Any) -> Any:
    """A copy of a list, or of an analysis with its lists, dictionaries and sets: compiling a plan writes into these."""
    copied_value = copy.copy(value)
    for name, part in vars(copied_value).items() if hasattr(copied_value, "__dict__") else ():
        if isinstance(part, dict | list | set):
            setattr(copied_value, name, copy.copy(part))
    return copied_value
