"""Which outputs of a captured graph a gradient of each of its inputs comes from.

A training loop may differentiate a part of what a module returned. Autograd then leaves `.grad` None where no gradient
reaches, and optimizers pass these parameters by. AOTAutograd makes up zeros for outputs that got no gradient, and hands
out zeros instead of None, which weight decay and momentum take for gradients.

Two readings are put together. In the joint graph the gradients that come in can be followed to those that go out; it
does not show a gradient that is zero by a formula, as that of `sign`. The autograd graph behind Dynamo's fake tensors
shows these, but not what is inside higher-order calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memfit.fxir.marks import is_tangent

__all__ = ["reached_by_autograd", "reached_in_joint"]


def reached_in_joint(joint: fx.GraphModule, num_forward_outputs: int) -> list[frozenset[int] | None]:
    """For each gradient a joint graph returns, the outputs of the module whose gradients it is made from.

    Returns:
        One entry for each input: empty without a gradient, None if a gradient it is made from belongs to none of the
        outputs (to an input that is written to, say).
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
    output = getattr(output, "base_of", output)  # of outputs that are views of one memory the gradient is that memory's
    place = getattr(output, "idx", None)
    return None if place is None else frozenset((place,))


def reached_by_autograd(gm: fx.GraphModule) -> list[frozenset[int]]:
    """For each input of Dynamo's graph the outputs that autograd goes back from to it."""
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
