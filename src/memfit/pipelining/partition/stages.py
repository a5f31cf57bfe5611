"""Cuts a forward graph into stages: modules that take the tensors of one cut and return the tensors of the next cut.

A stage shares the model's own parameters and buffers, under their names in the model, so an optimizer or a `state_dict`
of the model still works. Stages read the step's inputs directly; only results of the model's calls cross cuts. A tensor
that only passes through a stage is not given to its module: the engine sends it to the next stage. A tensor that the
stage reads and also sends to the next one is copied by the module, as its last call, so that gradients from later
stages are added first, as in the unpipelined step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.capture.fx_module import OneGraph
from memfit.pipelining.partition.boundary_layout import flattened, same_layout
from memfit.pipelining.partition.cut_points import Cut, constant_calls
from memfit.pipelining.partition.forward_graph import ForwardGraph

__all__ = ["Crossing", "Stage", "cut_into_stages", "example_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that crosses a cut.

    Attributes:
        name: of the call that produces it.
        shape: its sizes.
        stride: its strides; the tensor is dense.
        dtype: of its elements.
        requires_grad: whether it receives a gradient.
        gradient_stride: strides of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    gradient_stride: tuple[int, ...]

    @property
    def is_flat(self) -> bool:
        """Whether a stage returns the tensor, and takes its gradient, as one row in memory order.

        See `memfit.pipelining.partition.boundary_layout`.
        """
        return self.requires_grad and not same_layout(self.shape, self.stride, self.gradient_stride)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocates memory for the tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def empty_gradient(self, device: torch.device) -> torch.Tensor:
        """Allocates memory for the gradient."""
        return torch.empty_strided(self.shape, self.gradient_stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the model.

    Attributes:
        index: its place, from 0.
        module: takes the tensors of `arriving` at `taken`, then the `leaves` of the step's inputs; returns the tensors
            of `leaving` that do not pass through, flattened if `is_flat`; the module of the last stage returns the
            loss.
        arriving: tensors that cross the cut before it.
        leaving: tensors that cross the cut after it.
        taken: places in `arriving` of the tensors that the module takes.
        passed_through: for each tensor of `leaving`, its place in `arriving` if it only passes through, else None.
        leaves: places of the module's inputs among the leaves of the step's inputs.
        states: names of the model's parameters, buffers and other tensors that the stage reads.
    """

    index: int
    module: OneGraph
    arriving: tuple[Crossing, ...]
    leaving: tuple[Crossing, ...]
    taken: tuple[int, ...]
    passed_through: tuple[int | None, ...]
    leaves: tuple[int, ...]
    states: tuple[str, ...]


def cut_into_stages(forward: ForwardGraph, cuts: Sequence[Cut]) -> list[Stage]:
    """The stages between cuts.

    Args:
        forward: the model and its loss.
        cuts: one fewer than stages, in order.

    Returns:
        The stages, which together compute the forward graph.
    """
    calls = forward.calls
    constant = constant_calls(forward)
    ends = [cut.position for cut in cuts]
    strides = {node: stride for cut in cuts for node, stride in cut.gradient_strides.items()}
    crossings = {node: _crossing(node, strides.get(node)) for cut in cuts for node in cut.crossing}
    borders = [{}, *({node: crossings[node] for node in cut.crossing} for cut in cuts), {}]
    stages = []
    for index, (begin, end) in enumerate(zip([0, *ends], [*ends, len(calls)], strict=True)):
        own = [node for node in calls[begin:end] if node not in constant]
        stages.append(_stage(forward, index, own, borders[index], borders[index + 1]))
    return stages


def example_inputs(stage: Stage, leaves: Sequence[Any], device: torch.device) -> list[Any]:
    """Example inputs of a stage's module, with newly allocated tensors in place of the arriving ones."""
    taken = []
    for place in stage.taken:
        crossing = stage.arriving[place]
        tensor = crossing.empty(device) if crossing.dtype.is_floating_point else crossing.empty(device).zero_()
        taken.append(tensor.requires_grad_(crossing.requires_grad))
    return [*taken, *(leaves[place] for place in stage.leaves)]


def _stage(
    forward: ForwardGraph,
    index: int,
    own: Sequence[fx.Node],
    arriving: Mapping[fx.Node, Crossing],
    leaving: Mapping[fx.Node, Crossing],
) -> Stage:
    made = set(own)
    needed = _with_constants(own, made, set(arriving))
    read = {operand for node in needed for operand in node.all_input_nodes}
    taken = [node for node in arriving if node in read]
    inputs = [node for node in forward.inputs if node in read]
    states = [node for node in forward.states if node in read]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*states, *taken, *inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in needed:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in taken:
        if node in leaving:
            value = node.meta["example_value"].clone()
            copies[node] = graph.call_method("clone", (copies[node],))
            copies[node].meta = {**node.meta, "example_value": value}
    places = {node: place for place, node in enumerate(arriving)}
    results = [_returned(graph, copies[node], crossing) for node, crossing in leaving.items() if node in copies]
    graph.output(tuple(results) if leaving else (copies[forward.loss],))
    return Stage(
        index=index,
        module=OneGraph(graph, _tensors(forward, states), alone=not leaving),
        arriving=tuple(arriving.values()),
        leaving=tuple(leaving.values()),
        taken=tuple(places[node] for node in taken),
        passed_through=tuple(None if node in copies else places[node] for node in leaving),
        leaves=tuple(forward.inputs[node] for node in inputs),
        states=tuple(dict.fromkeys(forward.states[node] for node in states)),
    )


def _returned(graph: fx.Graph, made: fx.Node, crossing: Crossing) -> fx.Node:
    """Node that a stage's graph returns for a tensor that leaves, flattened if its crossing is flat."""
    if not crossing.is_flat:
        return made
    flat = graph.call_function(flattened, (made, crossing.gradient_stride))
    value = made.meta["example_value"].detach()
    flat.meta = {**made.meta, "example_value": value.new_empty(value.numel()).requires_grad_()}
    return flat


def _with_constants(own: Sequence[fx.Node], made: set[fx.Node], arriving: set[fx.Node]) -> list[fx.Node]:
    """A stage's calls and the constant calls they read, in an order in which each call comes after its operands."""
    order: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand.op not in ("placeholder", "output") and operand not in made | arriving and operand not in order:
                visit(operand)
        order[node] = None

    for node in own:
        visit(node)
    return list(order)


def _tensors(forward: ForwardGraph, states: Sequence[fx.Node]) -> dict[str, torch.Tensor]:
    return {forward.states[node]: forward.tensors[forward.states[node]] for node in states}


def _crossing(node: fx.Node, gradient_stride: tuple[int, ...] | None) -> Crossing:
    value = node.meta["example_value"]
    return Crossing(
        name=node.name,
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        dtype=value.dtype,
        requires_grad=value.requires_grad,
        gradient_stride=gradient_stride or tuple(value.stride()),
    )
