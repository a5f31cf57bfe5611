"""Record of one forward pass under a plan, until its backward pass has run.

A step need not be one forward and one backward pass: contrastive losses take several forward passes before one
backward pass, and loops discard outputs or differentiate only some of them. So each planned forward pass has a record.
The autograd nodes that run its subgraphs backward hold the record, so it lives as long as the tensors that the pass
saved. These nodes also tell the record which outputs received a gradient.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from memfit.capture.gradients.tangents import Strides, strides_without_overlap
from memfit.runtime.loop.expanded_gradients import RECORD, repeating
from memfit.runtime.loop.gradient_terms import Terms, by_use
from memfit.runtime.loop.unused_outputs import Begun, WholeGraph
from memfit.torch_compat.core import autocast_is_on

__all__ = ["CURRENT_PASS", "RECORD", "CompiledSubgraph", "Pass", "SubgraphPass", "in_flight"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pass:
    """One planned forward pass.

    Attributes:
        key: signature of its call; None outside of a fitted module.
        refused: collects the signatures of passes that are differentiated twice.
        widened: collects the signatures of passes in which a cut output got a gradient.
        narrowed: collects, by signature of the pass, the outputs that the forward pass leaves on a module or in a hook
            and that get no gradient.
        regions: collects the signatures of passes whose backward pass ran inside an autocast region against the plan
            (True), or outside of it against the plan (False).
        apart: collects the signatures of passes whose gradients are to be returned use by use.
        rounded: collects the signatures of passes whose gradients were added up in another order than in eager mode.
        turned: collects the signature of the first pass in which a gradient had another layout than planned.
        shares_casts: whether the pass begins in an autocast region in which other passes wait for their backward pass.
        executed: number of subgraphs that ran by the plan.
        waiting: number of subgraphs whose backward pass has not run.
        strayed: whether a subgraph ran as plain code because it was not planned.
        turns: number of runs of each graph that runs more than once, by its digest or key.
    """

    key: Any = None
    refused: set[Any] = field(default_factory=set)
    widened: set[Any] = field(default_factory=set)
    narrowed: dict[Any, frozenset[int]] = field(default_factory=dict)
    regions: set[tuple[Any, bool]] = field(default_factory=set)
    apart: set[Any] = field(default_factory=set)
    rounded: set[Any] = field(default_factory=set)
    turned: set[Any] = field(default_factory=set)
    shares_casts: bool = False
    executed: int = 0
    waiting: int = 0
    strayed: bool = False
    turns: Counter[str] = field(default_factory=Counter)


CURRENT_PASS: ContextVar[Pass | None] = ContextVar("memfit_pass", default=None)
"""The forward pass that runs now."""


@dataclass(slots=True, eq=False)
class CompiledSubgraph:
    """Record of one compiled graph.

    Attributes:
        reached: for each input, the outputs that its gradient comes from, None if unknown; empty if not analysed.
        places: of the outputs, among the gradients that autograd passes to the graph; known after the first run.
        lying: by output, the strides that its gradient is planned with.
        in_subgraphs: whether the step has other graphs as well.
        autocast: whether the backward pass is planned inside an autocast region (True) or outside of it (False); None
            if there is no region.
        assumed: outputs that are planned with a gradient by assumption, until a backward pass of the loop has run.
        without_gradient: cut outputs for which the loop, not the loss, decides whether they get a gradient.
        settled: whether a backward pass of the loop has run in the autocast region it was planned for.
        repeated: the place of each input that the graph takes again for a further use.
        summed: by place among the inputs, the names of the inputs whose gradients are sums over several uses.
        uses: by place among these inputs, the number of their uses.
        alone: whether a backward pass of the loop has run and was that of one forward pass.
        casts: whether autocast casts weights in the graph.
        summed_as_arrived: outputs whose gradients are summed up as they arrive, where they repeat numbers.
        whole: the graph, to recompute it if a cut output gets a gradient or the autocast region differs; None if
            neither can happen.
    """

    reached: Sequence[frozenset[int] | None] = ()
    places: dict[int, int] = field(default_factory=dict)
    lying: Mapping[int, Strides] = field(default_factory=dict)
    in_subgraphs: bool = False
    autocast: bool | None = None
    assumed: frozenset[int] = frozenset()
    without_gradient: frozenset[int] = frozenset()
    settled: bool = False
    repeated: Sequence[int] = ()
    summed: Mapping[int, str] = field(default_factory=dict)
    uses: Mapping[int, int] = field(default_factory=dict)
    alone: bool = False
    casts: bool = False
    summed_as_arrived: frozenset[int] = frozenset()
    whole: WholeGraph | None = None

    def may_be_shared(self) -> bool:
        """Whether the loop may run other forward passes before the backward pass, which matters for sums."""
        return bool(self.uses) and not self.alone and self.whole is not None

    def told_apart(self) -> bool:
        """Whether it matters which outputs got a gradient."""
        return self.in_subgraphs or self.whole is not None or len({r for r in self.reached if r}) > 1


@dataclass(slots=True, eq=False)
class SubgraphPass:
    """One run of a graph.

    Attributes:
        of: the pass it belongs to.
        subgraph: the graph.
        missing: outputs that got no gradient in the current backward pass.
        nothing: whether no output got a gradient.
        begun: for a graph with cut outputs, the inputs and random states that recompute it.
        arrived: gradients of cut outputs in the current backward pass.
        others: gradients of the other outputs, if the graph will be recomputed.
        without: outputs planned with a gradient that got none in the current backward pass, the first of the loop.
        otherwise: whether the current backward pass runs in another autocast region than planned.
        sums: by place among the inputs, address and version of each gradient that is a sum.
        terms: gradients to return use by use; None if the inputs of the run have one edge each.
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
    terms: Terms | None = None
    repeating: dict[int, torch.Tensor] = field(default_factory=dict)

    def tell_of_casts(self) -> None:
        """Warns, once, that eager casts weights once for all passes of an autocast region."""
        told = (self.of.key, "casts")
        if told not in self.of.rounded:
            self.of.rounded.add(told)
            log.warning(
                "several forward passes before a backward pass run in one autocast region: PyTorch casts weights once "
                "for all of them and adds up their gradients in half precision, a planned pass casts its own, so these "
                "gradients are equal to the baseline step's up to rounding; give each pass its own region, or call the "
                "model once on all inputs put together"
            )

    def together(self) -> bool:
        """Whether other passes share the backward pass and the gradients can be returned use by use."""
        if self.terms is None or self.nothing:
            return False
        shared = self.of.key in self.of.apart
        self.subgraph.alone = self.subgraph.alone or not shared
        return shared and self.begun is not None and self.begun.can_recompute()

    def watch(self, operands: Sequence[Any]) -> None:
        """Registers hooks on the gradients of inputs for which the graph adds up the gradients of several uses.

        Where other code adds to the same gradient, eager adds up all terms one after the other.
        """
        for place in self.subgraph.summed:
            if not (isinstance(operands[place], torch.Tensor) and operands[place].requires_grad):
                continue
            edge = get_gradient_edge(operands[place])
            handles: list[Any] = []
            arrived = functools.partial(self._note_sum, place, edge.output_nr, handles)
            handles.append(edge.node.register_prehook(arrived))

    def note_sums(self, gradients: Sequence[Any]) -> None:
        """Notes the sums among the gradients that the graph returns to autograd."""
        returned = {place: gradients[place] for place in self.subgraph.summed}
        self.sums = {place: _identity(g) for place, g in returned.items() if isinstance(g, torch.Tensor)}

    def _note_sum(self, place: int, output: int, handles: list[Any], gradients: Sequence[Any]) -> None:
        """Called by autograd with the whole gradient of an input, right before autograd continues from that input."""
        for handle in handles:
            handle.remove()
        mine, whole = self.sums.get(place), gradients[output]
        alone = mine is None or not isinstance(whole, torch.Tensor) or _identity(whole) == mine
        if alone or self.of.key is None or self.of.key in self.of.rounded:
            return
        self.of.rounded.add(self.of.key)
        self.of.apart.add(self.of.key)
        log.warning(
            "other code adds to the gradient of %s in the same backward pass, and the plan adds up those of several "
            "uses first: this step's is the baseline step's up to rounding, the next step is planned use by use",
            self.subgraph.summed[place],
        )

    def note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called by autograd with the incoming gradients, right before the graph runs backward."""
        absent = [gradient is None for gradient in gradients]
        self.missing = frozenset(o for o, place in self.subgraph.places.items() if absent[place])
        self.nothing = all(absent) and not self.arrived
        self.without = self._without()
        if self.arrived or self.without or self.together():
            self.others = self._by_output(gradients)

    def _without(self) -> frozenset[int]:
        """Outputs that the loop was assumed to use and does not use, if this becomes known only now."""
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
        """Called by autograd inside the autocast region that the backward pass runs in."""
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
            else "gradients of this step may be rounded otherwise than those of the baseline step",
            "the next step is planned inside; call backward() after the region, as PyTorch advises"
            if inside
            else "call backward() always inside or always outside",
        )

    def note_layouts(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called by autograd before the graph runs backward and copies gradients whose layout was not planned."""
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
            "may round otherwise than in the baseline step; pass the loss you really use, memfit.fit(..., loss_fn=...)"
        )

    def keep_repeating(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called with the gradients that the graph runs backward from, before AOTAutograd copies any."""
        self.repeating = repeating(self._by_output(gradients), self.subgraph.summed_as_arrived)

    def _by_output(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {o: g for o, place in self.subgraph.places.items() if (g := gradients[place]) is not None}

    def arrive(self, gradient: torch.Tensor, position: int) -> None:
        """Called by autograd with the gradient of a cut output, before the graph runs backward."""
        self.arrived[position] = gradient

    def recompute(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs from those of all outputs, cut ones included, by a second forward pass.

        Those of inputs that the graph takes again come use by use, the further uses last.
        """
        begun, arrived, by_cut = self.begun, self.others | self.arrived, frozenset(self.arrived)
        inside = self.otherwise is not bool(self.subgraph.autocast)  # if otherwise, the region that was not planned
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
        repeated = self.subgraph.repeated
        apart = {*repeated, *(() if self.terms is None else self.subgraph.uses)}
        gradients, terms = begun.gradients(arrived, in_autocast=inside, apart=apart)
        if self.terms is not None:
            self.terms.update((place, parts) for place, parts in terms.items() if place not in repeated)
        return by_use(gradients, terms, repeated)


def in_flight(passes: list[weakref.ref[Pass]]) -> list[Pass]:
    """The passes that still hold their saved tensors; the others are removed from the list."""
    alive = [(ref, one) for ref in passes if (one := ref()) is not None and one.waiting > 0]
    passes[:] = [ref for ref, _ in alive]
    return [one for _, one in alive]


def _lies_otherwise(gradient: torch.Tensor, strides: Strides) -> bool:
    """Whether a gradient without overlapping elements has other strides than planned along an axis longer than 1."""
    known = strides_without_overlap(gradient)
    return known is not None and any(
        ours != planned for size, ours, planned in zip(gradient.shape, known, strides, strict=True) if size > 1
    )


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity of a gradient's value; changes if autograd has added to the gradient, in place or not."""
    return (id(tensor), 0) if tensor.layout is not torch.strided else (tensor.data_ptr(), tensor._version)
