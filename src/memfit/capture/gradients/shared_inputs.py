"""Has a subgraph return one gradient per use of an input that other code uses as well.

Autograd adds up the gradients of a tensor in the order in which its uses run backward, the last use first. A subgraph
is one node of the autograd graph. If it uses an input twice, it returns the sum of both gradients, and the autograd
engine adds this sum to the gradient from later code: c + (b + a) instead of (c + b) + a, which rounds differently.

*Idea*: a subgraph takes such an input once for each use. Its node then has one edge per use to the node that made the
input, and the engine adds up the gradients of these edges in their order, which is eager's order. No op of the graph
uses the repeated inputs; the sum that AOTAutograd traced is split, and each term is the gradient of one of the
repetitions. AOTAutograd marks the additions of the engine, and Dynamo's fake tensors tell their number. The terms take
more memory than their sum, because each term lives until the backward pass of the subgraph ends. So where no other code
of the module uses an input, its sum stays. Where only earlier code uses it too, the sum would round as in eager, but it
could not be told from a sum to which code outside of the module added, so it is split. Code that memfit does not see
may use the input: another pass of the module, or a penalty on its parameters. Once a loop is seen to do so
(`memfit.runtime.loop.forward_passes`), all sums are split.

Known limits: an input that the graph overwrites keeps its sum, and so does an input that is used inside a higher-order
call, because its uses cannot be counted. The proof compares the bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memfit.capture.dynamo.dynamo_graph import outputs_of
from memfit.capture.gradients.autograd_graph import nodes_behind
from memfit.capture.subgraph_boundaries import Handed
from memfit.fxir.alias_analysis import written_inputs
from memfit.torch_compat.core import FakeTensor, TracingContext

__all__ = [
    "SharedInputs",
    "calling_with_each_once",
    "repeated_places",
    "return_each_term",
    "shared_inputs",
    "static_example",
    "taking_for_each_use",
    "terms_of_inputs",
    "uses_of_inputs",
]

SharedInputs = Mapping[str, Mapping[int, int]]
"""How often a graph takes an input, by the key of the graph and the place of the input."""

_Place = tuple[Any, int]
"""The place where autograd adds up a gradient: an autograd node and the index of its output, or a leaf."""


def uses_of_inputs(gm: fx.GraphModule) -> list[int]:
    """How many edges of the autograd graph behind Dynamo's fake tensors lead to each input of its graph."""
    results = [node.meta.get("example_value") for node in outputs_of(gm) if isinstance(node, fx.Node)]
    uses = Counter(_place_of(*edge) for node in nodes_behind(results) for edge in node.next_functions)
    places = [_place(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")]
    return [0 if place is None else uses[place] for place in places]


def terms_of_inputs(joint: fx.GraphModule, num_forward_outputs: int, uses: Sequence[int]) -> dict[int, int]:
    """By place of an input, the number of terms that its gradient is the sum of, where there are several.

    Args:
        joint: AOTAutograd's joint graph, as traced.
        num_forward_outputs: how many of its outputs belong to the forward pass.
        uses: how often each input of Dynamo's graph is used (`uses_of_inputs`).
    """
    primals = joint.graph.find_nodes(op="placeholder")
    gradients = outputs_of(joint)[num_forward_outputs:]
    if len(gradients) < len(uses):
        return {}  # AOTAutograd merged inputs
    written = written_inputs(joint.graph)
    found = {}
    for place, (times, primal, gradient) in enumerate(zip(uses, primals, gradients, strict=False)):
        if isinstance(gradient, fx.Node) and primal not in written:
            found[place] = len(_terms(gradient, times))
    return {place: terms for place, terms in found.items() if terms > 1}


def return_each_term(joint: fx.GraphModule, num_forward_outputs: int, repeated: Mapping[int, int]) -> None:
    """Splits sums of gradients into their terms, in place; the graph's inputs are those of `taking_for_each_use`.

    Args:
        joint: AOTAutograd's joint graph, as traced.
        num_forward_outputs: how many of its outputs belong to the forward pass.
        repeated: by place of an input, how often the input is taken.
    """
    if not repeated:
        return
    (output,) = joint.graph.find_nodes(op="output")
    results = list(output.args[0])
    extra = len(results) - sum(times - 1 for times in repeated.values())
    for place, times in sorted(repeated.items()):
        terms = _terms(results[num_forward_outputs + place], times)
        results[num_forward_outputs + place] = terms[0]
        for offset, term in enumerate(terms[1:]):
            results[extra + offset] = term
        extra += times - 1
    output.args = (tuple(results),)
    joint.recompile()


def taking_for_each_use(
    gm: fx.GraphModule, inputs: Sequence[Any], repeated: Mapping[int, int]
) -> tuple[fx.GraphModule, list[Any]]:
    """A graph that takes some inputs again, after all others, and examples of its inputs."""
    if not repeated:
        return gm, list(inputs)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in (placeholders := gm.graph.find_nodes(op="placeholder")):
        copied[node] = graph.node_copy(node)
    examples = list(inputs)
    for number, place in enumerate(repeated_places(repeated)):
        graph.placeholder(f"{placeholders[place].name}_again_{number}")
        examples.append(static_example(inputs[place]))
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            copied[node] = graph.node_copy(node, copied.__getitem__)
    taking = fx.GraphModule(gm, graph)
    taking.meta = {}  # Dynamo's has a source for each input
    return taking, examples


def repeated_places(repeated: Mapping[int, int]) -> list[int]:
    """The places of the inputs that a graph of `taking_for_each_use` takes after the others."""
    return [place for place, times in sorted(repeated.items()) for _ in range(1, times)]


def calling_with_each_once(call: Callable[..., Any], repeated: Mapping[int, int]) -> Callable[..., Any]:
    """Wraps a compiled graph of `taking_for_each_use` so that it is called with each input once."""
    if not repeated:
        return call
    places = repeated_places(repeated)

    def run(*operands: Any) -> Any:
        return call(*operands, *[operands[place] for place in places])

    return run


def shared_inputs(
    graphs: Iterable[tuple[str, Handed, Mapping[int, int]]], ends: Sequence[torch.Tensor]
) -> SharedInputs:
    """The inputs with several uses in a graph that other code uses as well: another graph, or code between graphs.

    Args:
        graphs: for each graph its key, the outputs that it handed over, and the terms of its inputs
            (`terms_of_inputs`).
        ends: tensors that the module returned and the loss may use.
    """
    used: dict[_Place, list[int]] = {}
    for node in nodes_behind(ends):
        for edge in node.next_functions:
            used.setdefault(_place_of(*edge), []).append(node._sequence_nr())
    returned = {_place(value) for value in ends}
    shared: dict[str, dict[int, int]] = {}
    for key, handed, terms in graphs:
        for place in terms.keys() & handed.edge_of.keys():
            where = _place_of(*handed.node.next_functions[handed.edge_of[place]])
            if where in returned or any(when != handed.node._sequence_nr() for when in used.get(where, ())):
                shared.setdefault(key, {})[place] = terms[place]
    return shared


def static_example(example: torch.Tensor) -> torch.Tensor:
    """A leaf like a tensor, as an example of another input; its shape is static, as those of Dynamo's inputs are.

    AOTAutograd treats a tensor that is passed twice as one input, and treats shapes of tensors that it has not seen
    before as dynamic.
    """
    other = example.detach().requires_grad_()
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if mode is None or isinstance(other, FakeTensor):
        return other
    return mode.from_tensor(other, static_shapes=True)


def _terms(gradient: fx.Node, most: int) -> list[fx.Node]:
    """The terms that the autograd engine added up to a gradient, in the engine's order."""
    later: list[fx.Node] = []
    while len(later) + 1 < most and gradient.meta.get("is_gradient_acc") and len(gradient.args) == 2:
        before, term = gradient.args
        if not isinstance(before, fx.Node) or not isinstance(term, fx.Node):
            break
        later.append(term)
        gradient = before
    return [gradient, *reversed(later)]


def _place(value: Any) -> _Place | None:
    """The place where autograd adds up the gradient of a tensor; None if the tensor needs no gradient."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    return (id(value), 0) if value.grad_fn is None else (value.grad_fn, value.output_nr)


def _place_of(node: Any, output: int) -> _Place:
    """The place that an edge leads to; a leaf stands for its node, which autograd makes again for another graph."""
    variable = getattr(node, "variable", None)
    return (node, output) if variable is None else (id(variable), 0)
