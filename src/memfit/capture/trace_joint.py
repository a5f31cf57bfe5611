"""Has AOTAutograd trace the joint graph of a forward and a backward pass, and no more than that.

AOTAutograd traces, cuts the joint graph in two and compiles both. On the way it writes the code of each graph down, for
its logs and for Python to run, which nobody reads where the graph is changed next. A capture needs no more than the
joint graph.

*Idea*: codes of graphs are written when they are called first, as Inductor has it too; texts for logs are made only
where somebody asks for logs; and a capture ends the work by an exception once it has read the joint graph.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch._functorch.aot_autograd as aot
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from memfit.capture.eager_kernels import as_in_eager
from memfit.capture.tangents import Strides, laid_out_as_made

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
) -> Callable[..., Any]:
    """A graph compiled by AOTAutograd, traced as eager PyTorch runs it.

    Args:
        gm: as Dynamo made it.
        inputs: examples.
        strides: by places of outputs how their gradients lie, where that is not as the outputs do.
        partition: cuts the joint graph in two.
        forward: compiles the graph of the forward pass, or the graph where no gradient reaches it.
        backward: compiles that of the backward pass.
    """
    with as_in_eager(), laid_out_as_made(strides), _use_lazy_graph_module(True), _without_texts():
        trace = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
        compiled: Callable[..., Any] = trace(gm, inputs)
        return compiled


def hand_over_joint(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    strides: Mapping[int, Strides],
    read: Callable[[fx.GraphModule, int], None],
) -> None:
    """Calls `read` with the joint graph and the number of outputs of its forward pass, if a gradient reaches it."""

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> NoReturn:
        read(joint, num_fwd_outputs)
        raise _HasReadError

    with suppress(_HasReadError):
        trace_joint(gm, inputs, strides=strides, partition=partition, forward=_as_is, backward=_as_is)


class _HasReadError(Exception):
    """No error: the joint graph was read, and is neither cut nor compiled."""


def _as_is(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    return gm


@contextmanager
def _without_texts() -> Iterator[None]:
    """While active, AOTAutograd makes no texts of graphs, unless somebody asked for its logs."""
    setattr(aot, _CONFIG, _PLAIN_CONFIG if _logs_wanted() else _SILENT_CONFIG)
    try:
        yield
    finally:
        setattr(aot, _CONFIG, _PLAIN_CONFIG)


def _logs_wanted() -> bool:
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    return "TORCH_TRACE" in os.environ or any(log.isEnabledFor(logging.INFO) for log in logs)
