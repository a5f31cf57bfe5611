"""Makes AOTAutograd trace the joint graph of a forward and a backward pass, and skip work with unused results.

AOTAutograd traces the joint graph, cuts it in two and compiles both parts. It also generates Python code for each graph
and prints each graph for its logs. memfit changes most of these graphs before they run, and a capture needs the joint
graph only.

*Idea*: code is generated when a graph runs for the first time (lazy graph modules, as Inductor uses them). Graphs are
printed only if the logs are enabled. A capture stops AOTAutograd by an exception once it has read the joint graph,
which is kept for the plans (`memfit.capture.dynamo.kept_trace`).

Known limits: these settings belong to the process, so graphs that another thread compiles meanwhile are not printed.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from torch import fx

from memfit.capture.dynamo.kept_trace import KeptTrace, traced_once
from memfit.capture.eager.no_decomposition import as_in_eager
from memfit.capture.gradients.tangents import Strides, laid_out_as_made
from memfit.torch_compat.compiler import aot, aot_autograd, graph_compile
from memfit.torch_compat.core import use_lazy_graph_module

__all__ = ["hand_over_joint", "trace_joint"]

_CONFIG = "AOTConfig"
_PLAIN_CONFIG = getattr(aot, _CONFIG)
_SILENT_CONFIG = functools.partial(_PLAIN_CONFIG, enable_log=False)


def trace_joint(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    strides: Mapping[int, Strides],
    partition: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    kept: KeptTrace | None = None,
    keep: Callable[[KeptTrace], None] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with AOTAutograd, traced as eager PyTorch runs it.

    Args:
        gm: the graph, as Dynamo made it.
        inputs: example inputs.
        strides: by place of an output, the strides of its gradient, where they differ from those of the output.
        partition: cuts the joint graph in two.
        forward: compiles the forward graph, or the whole graph if no gradient reaches it.
        backward: compiles the backward graph.
        kept: the kept joint graph, if this same graph was traced before with gradients of these strides.
        keep: is called with the trace that another call takes as `kept`.
    """
    settings = as_in_eager(), laid_out_as_made(strides), use_lazy_graph_module(True), _without_texts()
    with ExitStack() as around:
        for setting in (*settings, traced_once(kept=kept, keep=keep)):
            around.enter_context(setting)
        trace = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
        compiled: Callable[..., Any] = trace(gm, inputs if kept is None else kept.inputs)
        return compiled


def hand_over_joint(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    strides: Mapping[int, Strides],
    read: Callable[[fx.GraphModule, int], None],
    keep: Callable[[KeptTrace], None] | None = None,
) -> None:
    """Calls `read` with the joint graph and the number of outputs of its forward pass, if a gradient reaches it.

    Args:
        gm: the graph, as Dynamo made it.
        inputs: example inputs.
        strides: see `trace_joint`.
        read: may change the joint graph.
        keep: is called before `read`, with the trace that `trace_joint` takes as `kept`.
    """

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> NoReturn:
        read(joint, num_fwd_outputs)
        raise _HasReadError

    with suppress(_HasReadError):
        trace_joint(
            *(gm, inputs),
            strides=strides,
            partition=partition,
            forward=_as_is,
            backward=_as_is,
            keep=keep,
        )


class _HasReadError(Exception):
    """No error: the joint graph was read, and is neither cut nor compiled."""


def _as_is(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    return gm


@contextmanager
def _without_texts() -> Iterator[None]:
    """While active, AOTAutograd prints no graphs, unless its logs are enabled."""
    setattr(aot, _CONFIG, _PLAIN_CONFIG if _logs_wanted() else _SILENT_CONFIG)
    try:
        yield
    finally:
        setattr(aot, _CONFIG, _PLAIN_CONFIG)


def _logs_wanted() -> bool:
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    return "TORCH_TRACE" in os.environ or any(log.isEnabledFor(logging.INFO) for log in logs)
