"""Gradients of the uses of an input, returned term by term where a loop turns out to run several forward passes.

A planned pass adds up the gradients of all uses of a parameter and returns one sum. Where several passes share a
backward pass, eager adds up the terms of all passes one after the other, which rounds differently. Whether another pass
follows is known only after the first one has run.

Idea: until the loop is known, an input with several uses enters the graph through a node that has one edge per use to
the input. If a second pass begins before the backward pass, both passes are recomputed as plain code, as a graph with a
cut output is (`memfit.runtime.loop.unused_outputs`). Hooks on the nodes of the plain code collect the terms in the
order in which autograd makes them, and the node returns one term per edge. So autograd adds them up in eager's order.
Later steps are planned use by use (`memfit.capture.gradients.shared_inputs`).

Known limits: a graph that cannot be recomputed returns sums; a notice tells it. Inputs that are no parameters have one
edge. With `create_graph=True` the sum is returned. Until the loop is known, a graph between graph breaks keeps its
inputs until its backward pass, also those that the plan would free earlier.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from memfit.capture.gradients.autograd_graph import nodes_behind

__all__ = ["Parts", "Terms", "by_use", "collect_terms", "with_edges"]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The gradient of an input, whole and use by use.

    Attributes:
        terms: gradients of the single uses, in the order in which autograd makes them.
        whole: address and version of their sum.
    """

    terms: list[torch.Tensor]
    whole: tuple[int, int]

    def is_whole(self, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is the sum of the terms and nothing was added to it."""
        return bool(self.terms) and gradient is not None and (gradient.data_ptr(), gradient._version) == self.whole


Terms = dict[int, Parts]
"""By place of an input, its gradient use by use."""


def with_edges(operands: Sequence[Any], uses: Mapping[int, int], terms: Terms) -> tuple[Any, ...]:
    """The operands of a graph; those with several uses get one edge of the autograd graph for each use.

    Args:
        operands: inputs of the graph.
        uses: number of uses, by place.
        terms: is filled before the edges are used, with the gradients to return on them; for other inputs the gradient
            that arrives is returned on the first edge.
    """
    taken = list(operands)
    for place, times in uses.items():
        value = operands[place]
        if type(value) is nn.Parameter and value.requires_grad:
            taken[place] = _Edges.apply(terms, place, *[value] * times)
    return tuple(taken)


def collect_terms(
    outputs: Iterable[Any], leaves: Sequence[Any], places: Iterable[int]
) -> dict[int, list[torch.Tensor]]:
    """Terms of the gradients of some leaves, filled while autograd runs backward through the outputs.

    Args:
        outputs: results of plain code.
        leaves: inputs of the plain code, leaves of the autograd graph.
        places: of the leaves whose terms are wanted.
    """
    terms: dict[int, list[torch.Tensor]] = {place: [] for place in places if isinstance(leaves[place], torch.Tensor)}
    targets = {get_gradient_edge(leaves[p]).node: p for p in terms if leaves[p].requires_grad}
    for node in nodes_behind(outputs):
        found = {index: targets[to] for index, (to, _) in enumerate(node.next_functions) if to in targets}
        if found:
            node.register_hook(functools.partial(_collect, terms, found))
    return terms


def _collect(
    terms: Mapping[int, list[torch.Tensor]], found: Mapping[int, int], gradients: Sequence[Any], _: Any
) -> None:
    for index, place in found.items():
        if gradients[index] is not None:
            terms[place].append(gradients[index])


def by_use(
    gradients: Sequence[torch.Tensor | None], terms: Mapping[int, Parts], repeated: Sequence[int]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a graph that takes some inputs again, use by use; the further uses come last.

    Args:
        gradients: the whole gradient of each input.
        terms: the terms of those that have several.
        repeated: the place of each input that the graph takes again, once for each further use.
    """
    returned, further = list(gradients), []
    for place, times in Counter(repeated).items():
        parts = terms.get(place)
        apart = [returned[place]] if parts is None or not parts.terms else parts.terms
        returned[place], *rest = _spread(apart, times + 1)
        further += rest
    return (*returned, *further)


def _spread(terms: Sequence[torch.Tensor | None], edges: int) -> list[torch.Tensor | None]:
    """A term for each edge, None where there are fewer; the first edge gets the sum of those that are too many."""
    more = len(terms) - edges + 1
    if more <= 1:
        return [*terms, *[None] * (1 - more)]
    first = functools.reduce(torch.add, [term for term in terms[:more] if term is not None])
    return [first, *terms[more:]]


class _Edges(torch.autograd.Function):
    """A view of a tensor, with several edges to it."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, place: int, *same: torch.Tensor) -> torch.Tensor:
        ctx.terms, ctx.place, ctx.edges = terms, place, len(same)
        return same[0].view_as(same[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        known = ctx.terms.pop(ctx.place, None)
        # With create_graph=True the sum is returned, since the terms have no autograd graph. The sum is returned too
        # where other code has added to it, for example where the graph returns the parameter.
        taken = known is not None and known.is_whole(gradients[0]) and not torch.is_grad_enabled()
        returned = known.terms if taken else list(gradients)
        return None, None, *_spread(returned, ctx.edges)
