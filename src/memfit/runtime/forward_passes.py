"""Record of one forward pass under a plan, until its backward pass has run.

A step need not be one forward and one backward pass: contrastive losses take several forward passes before one
backward pass, loops throw outputs away, or differentiate a part of them. So each planned forward pass has a record. The
nodes of autograd that run its subgraphs backward hold it, so it lasts as long as what the pass saved; and they tell it
which outputs a gradient came for.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from memfit.capture.eager.backward_autocast import autocast_is_on
from memfit.capture.gradients.tangents import Strides, strides_without_overlap
from memfit.errors import SecondDerivativeError
from memfit.runtime.unused_outputs import Begun, WholeGraph, with_anchor

__all__ = ["CompiledSubgraph", "Pass", "SubgraphPass", "in_flight", "noting_backward", "noting_forward"]

log = logging.getLogger(__name__)

_RECORD = "memfit_subgraph_pass"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pass:
    """One planned forward pass.

    Attributes:
        key: signature of its call; None outside of a fitted module.
        refused: where the signatures of passes are noted that are differentiated twice.
        widened: where the signatures of passes are noted of which a cut output got a gradient.
        narrowed: where by signatures of passes the outputs are noted that left by a side door and get no gradient.
        regions: where the signatures of passes are noted whose backward pass ran inside an autocast region and was not
            planned so (True), or the other way round (False).
        apart: where the signatures of passes are noted whose gradients shall be returned use by use.
        turned: where the signature of the first pass is noted of which a gradient came in another layout than planned.
        executed: how many subgraphs have run by the plan.
        waiting: of how many the backward pass has not run.
        strayed: whether a subgraph ran plainly because it was not planned.
        turns: how often graphs have run that run more than once, by digest.
    """

    key: Any = None
    refused: set[Any] = field(default_factory=set)
    widened: set[Any] = field(default_factory=set)
    narrowed: dict[Any, frozenset[int]] = field(default_factory=dict)
    regions: set[tuple[Any, bool]] = field(default_factory=set)
    apart: set[Any] = field(default_factory=set)
    turned: set[Any] = field(default_factory=set)
    executed: int = 0
    waiting: int = 0
    strayed: bool = False
    turns: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class CompiledSubgraph:
    """Record of one compiled graph.

    Attributes:
        reached: for each input the outputs its gradient comes from, None if that is not known; empty: not looked at.
        places: of outputs among the gradients autograd hands to the graph, once it ran.
        lying: by outputs the strides that their gradients are planned with.
        in_subgraphs: whether the step has other graphs as well.
        autocast: whether the backward pass is planned inside a region (True) or outside (False); None if there is none.
        assumed: outputs that are planned with a gradient, and of which no backward pass of the loop has told yet.
        without_gradient: outputs that are cut since the loop, not the loss, brings them a gradient or none.
        settled: whether a backward pass of the loop has run in the autocast region it was planned for.
        repeated: how many inputs it takes once more, for another use; recomputed, the first brings the whole gradient.
        summed: by places among the inputs the names of those whose gradients are sums of several uses.
        whole: the graph, to recompute it where an output that was cut gets a gradient or the region is another; None
            where neither can be.
    """

    reached: Sequence[frozenset[int] | None] = ()
    places: dict[int, int] = field(default_factory=dict)
    lying: Mapping[int, Strides] = field(default_factory=dict)
    in_subgraphs: bool = False
    autocast: bool | None = None
    assumed: frozenset[int] = frozenset()
    without_gradient: frozenset[int] = frozenset()
    settled: bool = False
    repeated: int = 0
    summed: Mapping[int, str] = field(default_factory=dict)
    whole: WholeGraph | None = None

    def told_apart(self) -> bool:
        """Whether it matters which outputs got a gradient."""
        return self.in_subgraphs or self.whole is not None or len({r for r in self.reached if r}) > 1


@dataclass(slots=True, eq=False)
class SubgraphPass:
    """One run of a graph.

    Attributes:
        of: the pass it belongs to.
        subgraph: the graph.
        missing: outputs that got no gradient in the backward pass that runs now.
        nothing: whether no output got one.
        begun: of a graph with cut outputs, the inputs and random states that recompute it.
        arrived: gradients of cut outputs in the backward pass that runs now.
        others: gradients of other outputs, if there are such.
        without: outputs of the plan's that got no gradient in the backward pass that runs now, the first of the loop.
        otherwise: whether the backward pass that runs now is in another autocast region than planned.
        sums: by places among the inputs where gradients lie that are sums, and their versions.
    """

    of: Pass
    subgraph: CompiledSubgraph
    missing: frozenset[int] = frozenset()
    nothing: bool = False
    begun: Begun | None = None
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    others: dict[int, torch.Tensor] = field(default_factory=dict)
    without: frozenset[int] = frozenset()
    otherwise: bool = False
    sums: dict[int, tuple[int, int]] = field(default_factory=dict)

    def watch(self, operands: Sequence[Any]) -> None:
        """Has autograd tell what gradient arrives at inputs that the graph adds up gradients for.

        Where other code brings some as well, eager adds up all of them one after the other.
        """
        for place in self.subgraph.summed:
            if not (isinstance(operands[place], torch.Tensor) and operands[place].requires_grad):
                continue
            edge = get_gradient_edge(operands[place])
            handles: list[Any] = []
            arrived = functools.partial(self._note_sum, place, edge.output_nr, handles)
            handles.append(edge.node.register_prehook(arrived))

    def note_sums(self, gradients: Sequence[Any]) -> None:
        """Told what the graph returns to autograd."""
        returned = {place: gradients[place] for place in self.subgraph.summed}
        self.sums = {place: _identity(g) for place, g in returned.items() if isinstance(g, torch.Tensor)}

    def _note_sum(self, place: int, output: int, handles: list[Any], gradients: Sequence[Any]) -> None:
        """Told by autograd, right before it goes on from an input, the whole gradient of that."""
        for handle in handles:
            handle.remove()
        mine, whole = self.sums.get(place), gradients[output]
        alone = mine is None or not isinstance(whole, torch.Tensor) or _identity(whole) == mine
        if alone or self.of.key is None or self.of.key in self.of.apart:
            return
        self.of.apart.add(self.of.key)
        log.warning(
            "other code adds to the gradient of %s in the same backward pass, and the plan adds up those of several "
            "uses first: this step's is equal to the plain one up to rounding, the next step is planned use by use",
            self.subgraph.summed[place],
        )

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Told by autograd, right before the graph runs backward, what comes in."""
        absent = [gradient is None for gradient in gradients]
        self.missing = frozenset(o for o, place in self.subgraph.places.items() if absent[place])
        self.nothing = all(absent) and not self.arrived
        self.without = self._without()
        if self.arrived or self.without:
            self.others = self._by_output(gradients)

    def _without(self) -> frozenset[int]:
        """Outputs that the loop was assumed to use and does not, if that is known now for the first time."""
        assumed, key = self.subgraph.assumed, self.of.key
        if not assumed or key is None or self.nothing:
            return frozenset()
        self.subgraph.assumed = frozenset()
        without = assumed & self.missing
        known = key in self.of.widened or key in self.of.narrowed
        return (
            without if without and not known and self.begun is not None and self.begun.can_recompute() else frozenset()
        )

    def note_autocast(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Told by autograd, in the region that the backward pass runs in."""
        inside = autocast_is_on()
        if inside is self.subgraph.autocast:
            self.subgraph.settled = self.subgraph.settled or self.of.key is not None
            return
        self.otherwise = self.begun is not None and self.begun.can_recompute()
        if self.otherwise:
            self.others = self._by_output(gradients)
        if (self.of.key, inside) in self.of.regions:
            return
        self.of.regions.add((self.of.key, inside))
        log.warning(
            "the backward pass runs %s, where PyTorch computes some gradients in other dtypes, and it was planned %s: "
            "%s; %s",
            "inside an autocast region" if inside else "outside of the autocast region",
            "outside" if inside else "inside",
            "this step's forward pass is recomputed without a plan, with the same bits and over the budget"
            if self.otherwise
            else "gradients of this step may be rounded otherwise than the plain ones",
            "the next step is planned inside; call backward() after the region, as PyTorch advises"
            if inside
            else "call backward() always inside or always outside",
        )

    def note_layouts(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Told by autograd, before the graph runs backward and copies what lies otherwise than planned."""
        arrived = self._by_output(gradients)
        if self.of.turned or not any(
            _lies_otherwise(gradient, self.subgraph.lying[output])
            for output, gradient in arrived.items()
            if output in self.subgraph.lying
        ):
            return
        self.of.turned.add(self.of.key)
        log.warning(
            "the gradient of an output arrives in another memory layout than planned: it is copied, and sums over it "
            "may round otherwise than in the plain step; pass the loss you really use, memfit.fit(..., loss_fn=...)"
        )

    def _by_output(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {o: g for o, place in self.subgraph.places.items() if (g := gradients[place]) is not None}

    def arrive(self, gradient: torch.Tensor, position: int) -> None:
        """Told by autograd, before that, the gradient of a cut output."""
        self.arrived[position] = gradient

    def recompute(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients of all outputs, cut ones too, by a second forward pass."""
        begun, arrived, by_cut = self.begun, self.others | self.arrived, frozenset(self.arrived)
        inside = self.otherwise is not bool(self.subgraph.autocast)  # the other one if otherwise
        without = self.without
        self.arrived, self.others, self.otherwise = {}, {}, False
        self.missing = self.without = frozenset()
        assert begun is not None
        if without:
            self.of.narrowed[self.of.key] = self.subgraph.without_gradient | without
            log.warning(
                "no gradient arrived for a tensor that the forward pass leaves on a module or in a hook, and it was "
                "planned with one, which may be used by the loop: this step's forward pass is recomputed without a "
                "plan, with the same bits and over the budget, and the next one is planned without that gradient; "
                "detach() such a tensor where the model leaves it"
            )
        beside = self.of.narrowed.get(self.of.key, self.subgraph.without_gradient)
        if by_cut and by_cut <= beside:
            self.of.narrowed[self.of.key] = beside - by_cut
            log.warning(
                "a gradient arrived for a tensor that the forward pass leaves on a module or in a hook, and it was "
                "planned without one: this step's forward pass is recomputed without a plan, with the same bits and "
                "over the budget, and the next one is planned with that gradient"
            )
        elif by_cut and self.of.key not in self.of.widened:
            self.of.widened.add(self.of.key)
            log.warning(
                "a gradient arrived for an output that the loss given to memfit does not use: this step's forward pass "
                "is recomputed without a plan, with the same bits and over the budget, and the next one is planned "
                "with all outputs; pass the loss you really use, memfit.fit(..., loss_fn=...)"
            )
        return begun.gradients(arrived, in_autocast=inside)


def in_flight(passes: list[weakref.ref[Pass]]) -> list[Pass]:
    """Those passes that still hold what they saved; the others are taken out of the list."""
    alive = [(ref, one) for ref in passes if (one := ref()) is not None and one.waiting > 0]
    passes[:] = [ref for ref, _ in alive]
    return [one for _, one in alive]


def noting_forward(
    call: Callable[..., Any], subgraph: CompiledSubgraph, current: Callable[[], Pass | None]
) -> Callable[..., Any]:
    """A compiled graph that hangs a record of each run on the node of autograd it makes."""

    def run(*operands: Any) -> Any:
        here = current()
        unsettled = subgraph.assumed or (subgraph.autocast is not None and not subgraph.settled)
        asked = subgraph.whole is not None and (subgraph.whole.cut or (unsettled and here and here.key is not None))
        begun = Begun.now(subgraph.whole, operands) if subgraph.whole is not None and asked else None
        outputs = call(*operands)
        node = None if here is None else _node_of(outputs, subgraph.places)
        if here is None or node is None:
            return outputs
        here.executed += 1
        here.waiting += 1
        record = SubgraphPass(here, subgraph)
        setattr(node, _RECORD, record)
        _refuse_second_derivatives(type(node))
        record.watch(operands)
        if subgraph.told_apart():
            node.register_prehook(record.note)
        if subgraph.autocast is not None:
            node.register_prehook(record.note_autocast)
        if subgraph.lying and here.key is not None and not here.turned:
            node.register_prehook(record.note_layouts)
        return outputs if begun is None else _anchored(outputs, record, begun, node)

    return run


def _anchored(outputs: Sequence[Any], record: SubgraphPass, begun: Begun, node: Any) -> tuple[Any, ...]:
    """The outputs, those that were cut with an edge to the node that runs the graph backward."""
    begun.done()
    record.begun = begun
    anchor = next(outputs[i] for i in record.subgraph.places if outputs[i].grad_fn is node)
    anchored = list(outputs)
    for position in begun.whole.cut:
        arrive = functools.partial(record.arrive, position=position)
        anchored[position] = with_anchor(outputs[position], anchor, arrive)
    return tuple(anchored)


def _refuse_second_derivatives(node_type: Any) -> None:
    """Makes the error say what to do when gradients of a node of this type are differentiated.

    AOTAutograd gives such gradients a node that fails. Some torch versions make it elsewhere; then their error stays.
    """
    function = getattr(node_type, "_forward_cls", None)
    make = getattr(function, "_double_backward", None)
    if function is None or make is None or getattr(make, _RECORD, False):
        return

    def double_backward(ctx: Any, *rest: Any) -> Any:
        gradients = make(ctx, *rest)
        record: SubgraphPass | None = getattr(ctx, _RECORD, None)
        made = next((g.grad_fn for g in gradients if isinstance(g, torch.Tensor) and g.grad_fn is not None), None)
        if record is not None and made is not None:
            made.register_prehook(functools.partial(_refuse, record.of))
        return gradients

    setattr(double_backward, _RECORD, True)
    function._double_backward = staticmethod(double_backward)


def _refuse(here: Pass, gradients: Any) -> None:
    here.refused.add(here.key)
    raise SecondDerivativeError(
        "a step under a plan is differentiated twice (create_graph=True), and planned graphs have no second "
        "derivative; for the pass that needs one call model.forward(...) in place of model(...), "
        "which runs the module's own "
        "code without a plan. From now on calls with such inputs run plainly"
    )


def _lies_otherwise(gradient: torch.Tensor, strides: Strides) -> bool:
    """Whether a gradient whose elements have memory of their own has other strides along an axis of several."""
    known = strides_without_overlap(gradient)
    return known is not None and any(
        ours != planned for size, ours, planned in zip(gradient.shape, known, strides, strict=True) if size > 1
    )


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity of a gradient's value; it changes where autograd has added something, in place or not."""
    return (id(tensor), 0) if tensor.layout is not torch.strided else (tensor.data_ptr(), tensor._version)


def _node_of(outputs: Sequence[Any], places: dict[int, int]) -> Any:
    """The node that runs the graph backward; notes, the first time, which of its outputs are which."""
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
    """The backward graph, which returns None for what no gradient reaches, and tells the pass that it ran."""

    @functools.wraps(call)
    def run(operands: list[Any]) -> Any:
        node = torch._C._current_autograd_node()
        record: SubgraphPass | None = getattr(node, _RECORD, None)
        if record is None:
            return call(operands)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            record.of.waiting -= 1
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if record.arrived or record.otherwise or record.without:
            operands.clear()
            gradients = record.recompute() + (None,) * record.subgraph.repeated
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
