"""Runs the second part of a backward pass later: autograd gets the gradients it waits for, the rest is deferred.

The generated backward graph is a single graph. Here it is split in two, and the first part also returns the values that
the second part reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfit.runtime.runner import BoxedFunction, Runner

__all__ = ["LATER", "Later", "in_two"]

LATER = "memfit_later"
"""Mark in the `meta` of a node that belongs to the second part."""

Later = list[Callable[[], object]]
"""List that receives the second part of a backward pass when the first part has run."""


def in_two(module: fx.GraphModule, later: Later, runner: Runner) -> BoxedFunction:
    """The first part of a backward graph; appends the second part to `later`, and empties the list of its arguments."""
    first, second = fx.Graph(), fx.Graph()
    of_first: dict[fx.Node, fx.Node] = {}
    of_second: dict[fx.Node, fx.Node] = {}
    (output,) = module.graph.find_nodes(op="output")
    behind = [node for node in module.graph.nodes if node.meta.get(LATER)]
    read = dict.fromkeys(n for node in behind for n in node.all_input_nodes if not n.meta.get(LATER))
    held = [node for node in read if node.op != "get_attr"]
    for node in held:
        of_second[node] = second.placeholder(node.name)
    for node in read:
        if node.op == "get_attr":
            of_second[node] = second.node_copy(node)
    for node in module.graph.nodes:
        if node is output:
            continue
        graph, copies = (second, of_second) if node.meta.get(LATER) else (first, of_first)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [None if isinstance(n, fx.Node) and n.meta.get(LATER) else n for n in output.args[0]]
    count = len(results)
    first.output(tuple(of_first[n] if isinstance(n, fx.Node) else n for n in (*results, *held)))
    second.output(())
    run_first = runner(fx.GraphModule(module, first))
    run_second = torch.no_grad()(runner(fx.GraphModule(module, second)))  # as within the backward pass

    def run(operands: list[Any]) -> Any:
        made = list(run_first(operands))
        # A saved result of the forward pass refers to its autograd graph, and that graph holds the inputs of the pass.
        # A tensor that is also returned as a gradient stays the same tensor: autograd then copies it instead of adding
        # to it in place.
        rest = [one.detach() if isinstance(one, torch.Tensor) and one.grad_fn else one for one in made[count:]]
        del made[count:]
        later.append(functools.partial(run_second, rest))
        return made

    return run
