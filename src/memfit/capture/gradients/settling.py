"""Traces each graph of a step again, given its uses by the other graphs and the loss, until nothing changes.

The layout of a gradient decides how sums over it round. A graph gets the layouts of its outputs' gradients from the
graph after it. These layouts may change the layouts of its inputs' gradients, which go to the graph before it, and so
on to the first graph. So it takes about as many rounds as there are graphs; each round traces only the graphs whose
surroundings changed.

*Idea*: a fixpoint over the graphs, as in data-flow analysis. The autograd graph of the captured forward pass stays
alive meanwhile, with one node for each graph; the node passes on zeros in the given layouts
(`memfit.capture.subgraph_boundaries`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.capture.dynamo.dynamo_graph import all_but
from memfit.capture.dynamo.traced_graph import DynamoGraph, Surroundings, Traced
from memfit.capture.gradients.shared_inputs import repeated_places
from memfit.capture.gradients.tangents import Strides
from memfit.capture.loss.reading import LossReading
from memfit.capture.subgraph_boundaries import lay_out_anew
from memfit.capture.subgraphs import (
    Subgraph,
    Subgraphs,
    gradient_outputs_of,
    gradient_strides_of,
    inputs_shared_in,
    unreached_in,
)

__all__ = ["settled"]

log = logging.getLogger(__name__)

_MOST_ROUNDS = 100


def settled(
    subgraphs: Subgraphs,
    graphs: Sequence[DynamoGraph],
    loss: LossReading,
    *,
    trace: Callable[[DynamoGraph, Surroundings], Traced | None],
    traced: bool,
    by_use: bool,
    cut: bool,
    cut_between: bool,
) -> Subgraphs:
    """The subgraphs of a step, each traced for its uses by the other subgraphs and the loss.

    Args:
        subgraphs: the captured subgraphs, while their autograd graph is alive.
        graphs: the Dynamo graph that each subgraph was traced from.
        loss: how the loss uses the output and tensors that left the module in another way.
        trace: traces a graph (again); returns None if no gradient reaches the graph, so that it runs as plain code.
        traced: whether the graphs have been traced already, without knowledge of their surroundings.
        by_use: whether every input with several uses is taken once for each use.
        cut: whether outputs of the last graph that receive no gradient are cut.
        cut_between: whether such outputs of earlier graphs are cut.
    """
    subgraphs = replace(subgraphs, loss=loss)
    only = len(graphs) == 1 and not graphs[0].key
    unreached = {} if only else unreached_in(subgraphs, loss)
    receive = gradient_outputs_of(subgraphs) if cut and subgraphs.last_key is not None else None
    between = unreached if cut and cut_between else {}
    last_key = subgraphs.last_key
    around = Surroundings() if traced else None
    pairs = zip(subgraphs.subgraphs, graphs, strict=True)
    runs = [_Run(subgraph=p, graph=g, inputs=p.inputs, around=around) for p, g in pairs]
    known: dict[DynamoGraph, list[tuple[Surroundings, Traced | None]]] = {}
    for _ in range(_MOST_ROUNDS):
        shared = inputs_shared_in(subgraphs, by_use=by_use)
        strides = _of_runs(runs, gradient_strides_of(subgraphs))
        anew = False
        for place, run in enumerate(runs):
            key = run.graph.key
            around = Surroundings(
                receive=receive if key == last_key else all_but(run.graph.gm, between.get(key, frozenset())),
                strides=strides[place],
                repeated=shared.get(key, {}),
            )
            if around != run.around:
                runs[place] = _in_other(run, around, _traced(run.graph, around, known, trace))
                anew = True
        runs = [run for run in runs if not run.plain]
        subgraphs = replace(subgraphs, subgraphs=tuple(run.subgraph for run in runs))
        if not anew:
            break
    else:
        log.info("layouts of gradients between graphs do not settle")  # the proof compares the bits
    return replace(
        subgraphs,
        gradient_outputs=receive,
        gradient_strides=_by_graph(runs),
        shared=shared,
        unreached=unreached,
        cut_between=between,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run of a graph.

    Attributes:
        subgraph: the subgraph as traced last.
        graph: the Dynamo graph that it was traced from.
        inputs: the inputs of the run.
        around: the surroundings it was traced with; None if it was not traced yet.
        plain: whether no gradient reaches it, so that it runs as plain code.
    """

    subgraph: Subgraph
    graph: DynamoGraph
    inputs: tuple[Any, ...]
    around: Surroundings | None
    plain: bool = False


def _of_runs(runs: Sequence[_Run], lying: Sequence[Mapping[int, Strides]]) -> list[dict[int, Strides]]:
    """For each run, the strides of its outputs' gradients, where they differ from those of the outputs.

    For an output that receives no gradient, the strides of the other runs are used, so that the runs share one trace.

    Args:
        runs: the runs of all graphs.
        lying: for each run, the strides of the gradients that it receives.
    """
    of_graph: dict[str, dict[int, Strides]] = {}
    for run, strides in zip(runs, lying, strict=True):
        of_graph.setdefault(run.graph.key, {}).update(strides)
    found = []
    for run, strides in zip(runs, lying, strict=True):
        told = {**of_graph[run.graph.key], **strides}
        outputs = run.subgraph.outputs
        found.append({place: lies for place, lies in told.items() if lies != tuple(outputs[place].stride())})
    return found


def _by_graph(runs: Sequence[_Run]) -> dict[str, tuple[Mapping[int, Strides], ...]]:
    """By graph, the strides of outputs' gradients in each run, if some differ from those of the outputs."""
    found: dict[str, tuple[Mapping[int, Strides], ...]] = {}
    for run in runs:
        strides = {} if run.around is None else run.around.strides
        found[run.graph.key] = (*found.get(run.graph.key, ()), strides)
    return {key: strides for key, strides in found.items() if any(strides)}


def _traced(
    graph: DynamoGraph,
    around: Surroundings,
    known: dict[DynamoGraph, list[tuple[Surroundings, Traced | None]]],
    trace: Callable[[DynamoGraph, Surroundings], Traced | None],
) -> Traced | None:
    """The trace of another run of the graph in the same surroundings, else a new trace."""
    before = known.setdefault(graph, [])
    for other, traced in before:
        if other == around:
            return traced
    before.append((around, trace(graph, around)))
    return before[-1][1]


def _in_other(run: _Run, around: Surroundings, traced: Traced | None) -> _Run:
    """A run in other surroundings, with the trace made for them."""
    if traced is None:
        return replace(run, around=around, plain=True)
    operands = (*run.inputs, *(run.inputs[place] for place in repeated_places(around.repeated)))
    lay_out_anew(run.subgraph.handed, run.inputs, traced.of_inputs)
    subgraph = replace(run.subgraph, trace=traced.trace, reading=traced.reading, terms=traced.terms, inputs=operands)
    return replace(run, around=around, subgraph=subgraph)
