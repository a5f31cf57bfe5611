"""Attaches the record of a forward pass to the autograd nodes that run its subgraphs backward.

AOTAutograd makes one autograd node for each run of a compiled graph. Hooks on this node see the gradients that arrive,
before the backward graph runs; the wrapped backward graph finds the record on the node that runs.

Known limits: the node is found by the name of AOTAutograd's class.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memfit.errors import SecondDerivativeError
from memfit.runtime.loop.forward_passes import CURRENT_PASS, RECORD, CompiledSubgraph, Pass, SubgraphPass
from memfit.runtime.loop.gradient_terms import Terms, with_edges
from memfit.runtime.loop.unused_outputs import Begun, with_anchor
from memfit.torch_compat.core import backward_keeps_graph, current_autograd_node

__all__ = ["in_turn", "noting_backward", "noting_forward", "straying"]


def noting_forward(call: Callable[..., Any], subgraph: CompiledSubgraph) -> Callable[..., Any]:
    """Wraps a compiled graph: each run attaches its record to the autograd node that the run creates."""

    def run(*operands: Any) -> Any:
        here = CURRENT_PASS.get()
        in_loop = here is not None and here.key is not None
        shared = in_loop and subgraph.may_be_shared()
        unsettled = in_loop and (subgraph.assumed or (subgraph.autocast is not None and not subgraph.settled))
        asked = subgraph.whole is not None and (subgraph.whole.cut or unsettled or shared)
        begun = Begun.now(subgraph.whole, operands) if subgraph.whole is not None and asked else None
        terms: Terms | None = {} if shared else None
        outputs = call(*(operands if terms is None else with_edges(operands, subgraph.uses, terms)))
        node = None if here is None else _node_of(outputs, subgraph.places)
        if here is None or node is None:
            return outputs
        here.executed += 1
        here.waiting += 1
        record = SubgraphPass(here, subgraph, terms=terms)
        setattr(node, RECORD, record)
        _refuse_second_derivatives(type(node))
        if subgraph.summed_as_arrived:
            _keep_repeating(type(node))
        record.watch(operands)
        if here.shares_casts and subgraph.casts:
            record.tell_of_casts()
        if subgraph.told_apart() or shared:
            node.register_prehook(record.note)
        if subgraph.autocast is not None:
            node.register_prehook(record.note_autocast)
        if subgraph.lying and here.key is not None and not here.turned:
            node.register_prehook(record.note_layouts)
        return outputs if begun is None else _anchored(outputs, record, begun, node)

    return run


def _anchored(outputs: Sequence[Any], record: SubgraphPass, begun: Begun, node: Any) -> tuple[Any, ...]:
    """The outputs; cut outputs get an edge to the node that runs the graph backward."""
    begun.done()
    record.begun = begun
    anchor = next(outputs[i] for i in record.subgraph.places if outputs[i].grad_fn is node)
    anchored = list(outputs)
    for position in begun.whole.cut:
        arrive = functools.partial(record.arrive, position=position)
        anchored[position] = with_anchor(outputs[position], anchor, arrive)
    return tuple(anchored)


def _keep_repeating(node_type: Any) -> None:
    """Has the backward pass of a compiled graph note the gradients that it takes, after all hooks on them have run."""
    function = getattr(node_type, "_forward_cls", None)
    run = getattr(function, "backward", None)
    if function is None or run is None or getattr(run, RECORD, False):
        return

    def backward(ctx: Any, *gradients: Any) -> Any:
        record: SubgraphPass | None = getattr(ctx, RECORD, None)
        if record is None:
            return run(ctx, *gradients)
        boxed = len(gradients) == 1 and isinstance(gradients[0], list)  # newer torch passes one list
        record.keep_repeating(gradients[0] if boxed else gradients)
        try:
            return run(ctx, *gradients)
        finally:
            record.repeating = {}

    setattr(backward, RECORD, True)
    function.backward = staticmethod(backward)


def _refuse_second_derivatives(node_type: Any) -> None:
    """Makes the error state a remedy when gradients of a node of this type are differentiated.

    AOTAutograd gives such gradients a node that fails. Some torch versions create this node elsewhere; then their own
    error stays.
    """
    function = getattr(node_type, "_forward_cls", None)
    make = getattr(function, "_double_backward", None)
    if function is None or make is None or getattr(make, RECORD, False):
        return

    def double_backward(ctx: Any, *rest: Any) -> Any:
        gradients = make(ctx, *rest)
        record: SubgraphPass | None = getattr(ctx, RECORD, None)
        made = next((g.grad_fn for g in gradients if isinstance(g, torch.Tensor) and g.grad_fn is not None), None)
        if record is not None and made is not None:
            made.register_prehook(functools.partial(_refuse, record.of))
        return gradients

    setattr(double_backward, RECORD, True)
    function._double_backward = staticmethod(double_backward)


def _refuse(here: Pass, gradients: Any) -> None:
    here.refused.add(here.key)
    raise SecondDerivativeError(
        "a step under a plan is differentiated twice (create_graph=True), and planned graphs have no second "
        "derivative; for the pass that needs one call model.forward(...) in place of model(...), "
        "which runs the module's own "
        "code without a plan. From now on calls with such inputs run plainly"
    )


def _node_of(outputs: Sequence[Any], places: dict[int, int]) -> Any:
    """The autograd node that runs the graph backward; the first call also fills `places`."""
    found = None
    for index, output in enumerate(outputs):
        if places and index not in places:
            continue
        for value in (output, getattr(output, "_base", None)):
            node = getattr(value, "grad_fn", None)
            if node is not None and type(node).__name__ == "CompiledFunctionBackward":
                if places:
                    return node
                found = node
                break
    if found is not None:
        places.update(_places(outputs, found))
    return found


def _places(outputs: Sequence[Any], node: Any) -> Mapping[int, int]:
    return {
        index: value.output_nr
        for index, output in enumerate(outputs)
        if isinstance(output, torch.Tensor)
        for value in (output, getattr(output, "_base", None))
        if value is not None and value.grad_fn is node
    }


def noting_backward(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wraps the backward graph: returns None for inputs that no gradient reaches, and notes in the pass that it ran."""

    @functools.wraps(call)
    def run(operands: list[Any]) -> Any:
        node = current_autograd_node()
        record: SubgraphPass | None = getattr(node, RECORD, None)
        if record is None:
            return call(operands)
        if not backward_keeps_graph():
            record.of.waiting -= 1
        kept = backward_keeps_graph()
        if record.arrived or record.otherwise or record.without or record.together():
            operands.clear()
            gradients = record.recompute()
            record.begun = record.begun if kept else None
            return gradients
        record.begun = record.begun if kept else None
        reached, missing, nothing = record.subgraph.reached, record.missing, record.nothing
        record.missing, record.nothing = frozenset(), False
        if nothing and reached:
            operands.clear()
            return tuple(None for _ in reached)
        results = call(operands)
        record.note_sums(results)
        if not missing or len(results) != len(reached):
            return results
        return tuple(None if of and of <= missing else r for r, of in zip(results, reached, strict=True))

    return run


def straying(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call that marks its pass as strayed: its graph was not planned and runs as plain code."""

    def run(*operands: Any) -> Any:
        here = CURRENT_PASS.get()
        if here is not None:
            here.strayed = True
        return call(*operands)

    return run


def in_turn(variants: Mapping[int, Callable[..., Any]], counted: str) -> Callable[..., Any]:
    """Makes a call that runs the programs of all runs in turn, for a graph that runs several times in a step.

    Args:
        variants: compiled calls, by the number of the run.
        counted: name under which runs are counted: runs of this graph alone, or of all graphs with the same program.
    """

    def run(*operands: Any) -> Any:
        here = CURRENT_PASS.get()
        turns = here.turns if here is not None else Counter[str]()
        turn = turns[counted]
        turns[counted] += 1
        nearest = turn if turn in variants else max(variants)
        return variants[nearest](*operands)

    return run
