"""Finds the outputs of a captured graph from which the gradient of each input comes.

A training loop may differentiate only a part of a module's outputs. Autograd then leaves `.grad` None for parameters
that no gradient reaches, and optimizers skip these parameters. AOTAutograd fills in zeros for outputs without a
gradient, and returns zeros instead of None, which weight decay and momentum treat as gradients.

Two analyses are combined. In the joint graph, tangents can be followed to the gradients of inputs, but the joint graph
does not show that a gradient is zero by its formula, as that of `sign` is. The autograd graph behind Dynamo's fake
tensors shows such gradients, but not the inside of higher-order calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memfit.fxir.marks import is_tangent

__all__ = ["reached_by_autograd", "reached_in_joint"]


def reached_in_joint(joint: fx.GraphModule, num_forward_outputs: int) -> list[frozenset[int] | None]:
    """For each gradient that a joint graph returns, the outputs of the module whose gradients it is computed from.

    Returns:
        One entry for each input: empty without a gradient, None if the gradient is computed from a tangent that belongs
        to none of the outputs (but, for example, to an input that is written to).
    """
    of: dict[fx.Node, frozenset[int] | None] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            of[node] = _output_of(node) if is_tangent(node) else frozenset()
            continue
        if node.op != "output":
            of[node] = _together([of[operand] for operand in node.all_input_nodes])
    (output,) = joint.graph.find_nodes(op="output")
    gradients = list(output.args[0])[num_forward_outputs:]
    return [of[node] if isinstance(node, fx.Node) else frozenset() for node in gradients]


def _together(parts: Sequence[frozenset[int] | None]) -> frozenset[int] | None:
    known = [part for part in parts if part is not None]
    return frozenset[int]().union(*known) if len(known) == len(parts) else None


def _output_of(tangent: fx.Node) -> frozenset[int] | None:
    """The output whose gradient a placeholder is, by AOTAutograd's description of it."""
    output = getattr(tangent.meta.get("desc"), "output", None)
    output = getattr(output, "base_of", output)  # outputs that are views of one base share the base's gradient
    place = getattr(output, "idx", None)
    return None if place is None else frozenset((place,))


def reached_by_autograd(gm: fx.GraphModule) -> list[frozenset[int]]:
    """For each input of Dynamo's graph, the outputs from which autograd reaches the input."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    reached: list[set[int]] = [set() for _ in values]
    leaves = {id(v): i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.is_leaf}
    made = {v.grad_fn: i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.grad_fn is not None}
    (output,) = gm.graph.find_nodes(op="output")
    for place, node in enumerate(output.args[0]):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if id(value) in leaves:
            reached[leaves[id(value)]].add(place)
        waiting: list[Any] = [value.grad_fn]
        seen: set[Any] = {None}
        while waiting:
            here = waiting.pop()
            if here in seen:
                continue
            seen.add(here)
            if here in made:
                reached[made[here]].add(place)
            variable = id(getattr(here, "variable", None))
            if variable in leaves:
                reached[leaves[variable]].add(place)
            waiting += [following for following, _ in here.next_functions]
    return [frozenset(places) for places in reached]
