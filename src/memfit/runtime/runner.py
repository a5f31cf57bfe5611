"""Runners: they make a lowered graph callable.

A lowered graph says everything about a pass: its nodes stand in the order of the program, and each value is gone after
its last use. PyTorch has several ways to execute such a graph (generated Python code, Inductor, CUDA graphs), and which
one runs it is a choice of its own. So the rest of the runtime knows only the protocol `Runner`.

`run_by_fx` is the first one: the Python code that FX generates. It takes the operands in a list and empties the list
("boxed", as AOTAutograd calls it), so operands are freed after their last use too.

Known limits: nodes of a graph may be Python functions with side effects (transfers to tiers), so a runner that records
kernels has to leave these out of what it records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx

from memfit.torch_compat.core import BoxedCodeGen

__all__ = ["BoxedFunction", "Runner", "run_by_fx"]

BoxedFunction = Callable[[list[Any]], Any]
"""Takes its operands in a list, which it empties, and returns the results of the graph as a sequence."""


class Runner(Protocol):
    """Makes lowered graphs callable."""

    def __call__(self, module: fx.GraphModule) -> BoxedFunction:
        """Prepares a lowered graph.

        Args:
            module: forward or backward graph of a subgraph, or a part of it; the runner may change it.

        Returns:
            A function that computes the graph's results with the same bits. It runs the nodes in their order, holds no
            value longer than until its last reader, and empties the list of its operands.
        """
        ...


def run_by_fx(module: fx.GraphModule) -> BoxedFunction:
    """The code that FX generates for a graph."""
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    forward: BoxedFunction = module.forward
    return forward
