"""A call of a module that Dynamo compiled for many sizes of its inputs.

Texts of many lengths, and the smaller last batch of an epoch, are calls that differ in a few sizes. Dynamo compiles
the call once with symbols for these sizes (its dynamic shapes), and the joint graph is traced once with symbols. The
step for given sizes then needs neither Dynamo nor tracing (`memfit.capture.dynamo.graph_at_sizes`).

Idea: ours; a compiler with dynamic shapes makes one kernel for all sizes, while here the graph, and with it the plan,
is of one size.

Known limits: one graph without breaks; sizes above 1; every symbol is the size of an input. Code that fixes a size
(`assert x.shape[1] == 128`) makes it a number, so that the call serves no other size.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from memfit.capture.call_settings import CallSettings
from memfit.capture.dynamo.compiled_call import call_by_dynamo
from memfit.capture.dynamo.dynamo_graph import copied, outputs_of, reads_numbers
from memfit.capture.dynamo.graph_at_sizes import NotOfSizesError, Sizes, sizes_of, trace_at_sizes
from memfit.capture.dynamo.kept_trace import KeptTrace
from memfit.capture.dynamo.recording import Recording, Source, ready_to_trace, record_ready
from memfit.capture.dynamo.traced_graph import DynamoGraph, Surroundings, as_dynamo_made, trace_with_symbols
from memfit.capture.eager.backward_autocast import backward_in_autocast
from memfit.capture.gradients.returned_views import no_views
from memfit.capture.state.input_signature import Signature, differ_in_sizes
from memfit.capture.values.decisions import Decision
from memfit.errors import PlanMismatchError
from memfit.torch_compat.core import FakeTensor, TracingContext, pytree
from memfit.torch_compat.symbols import bound_symbols, symbols_computed_once

__all__ = ["SymbolicCall", "recorded_at_sizes", "symbolic_call"]

log = logging.getLogger(__name__)

_MOST_OF_A_SIZE = 2**40
"""The most that a symbol stands for: torch then knows that slices without an end take all, and leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Serving:
    """What runs the graph of a call for many sizes.

    Attributes:
        run: takes the operands of the graph.
        captures: whether the step is captured; otherwise a plan runs.
    """

    run: Callable[[tuple[Any, ...]], Any]
    captures: bool


_SERVING: ContextVar[_Serving | None] = ContextVar("memfit_serving_sizes", default=None)


@dataclass(slots=True, kw_only=True, eq=False)
class SymbolicCall:
    """The call of a module with symbols for some sizes.

    Attributes:
        model: the module.
        signature: signature of the call that it was made for.
        varying: the sizes, by place of an input among the leaves of the arguments.
        call: takes the arguments of the module; its one graph runs by what serves the call.
        graph: the graph; its inputs are fake tensors with symbols.
        decisions: what was decided by values while it was made.
        given: pairs of the place of an input among the leaves of the arguments, and among the inputs of the graph.
        traces: joint graphs with symbols, with their surroundings.
        is_broken: whether the module has changed and needs another graph.
    """

    model: nn.Module
    signature: Signature
    varying: Mapping[int, Sequence[int]]
    call: Callable[..., Any] = field(init=False)
    graph: DynamoGraph | None = None
    decisions: list[Decision] = field(default_factory=list)
    given: tuple[tuple[int, int], ...] = ()
    traces: list[tuple[Surroundings, bool, KeptTrace]] = field(default_factory=list)
    is_broken: bool = False

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Takes the graph that Dynamo made, as a backend of `torch.compile`."""
        serving = _SERVING.get()
        if self.graph is not None and serving is not None and serving.captures:
            raise NotOfSizesError("the code of the module makes another graph")
        if self.graph is not None:
            self.is_broken = True
            raise PlanMismatchError(f"{type(self.model).__name__} now runs a graph that was not planned")
        gm, kept = _sizes_from_tensors(gm)
        gm, _, views = ready_to_trace(gm, [inputs[place] for place in kept], self.model)
        if views is not no_views or reads_numbers(gm):
            raise NotOfSizesError("the graph returns views of inputs, or reads numbers")
        examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        if not all(isinstance(example, FakeTensor) for example in examples):
            raise NotOfSizesError("an input is no tensor")
        sizes: list[Any] = [size for example in examples for size in example.shape]
        if not any(_is_symbol(size) for size in sizes):
            raise NotOfSizesError("the code of the module fixes the sizes")
        self.graph = as_dynamo_made(gm, examples, "", gathered=False)
        mode = self.graph.context.fake_mode
        assert mode is not None, "Dynamo makes fake tensors"
        bound_symbols(mode, _MOST_OF_A_SIZE)

        def run(*operands: Any) -> Any:  # Dynamo keeps this function, which must not hold the module
            now = _SERVING.get()
            assert now is not None, "the call is served"
            return now.run(tuple(operands[place] for place in kept))

        return run

    def serves(self, signature: Signature, leaves: Sequence[Any]) -> bool:
        """Whether the graph may be for a call; tells without calling the module.

        Args:
            signature: signature of the call.
            leaves: leaves of its arguments.
        """
        if self.is_broken or self.graph is None or not differ_in_sizes(signature, self.signature):
            return False
        try:
            self._checked([(leaves[place], self.graph.inputs[own]) for place, own in self.given])
        except NotOfSizesError as error:
            log.debug("a call for many sizes does not serve these: %s", error)
            return False
        return True

    def fixes(self, signature: Signature) -> bool:
        """Whether the graph has a number for a size that is another one in a call of this signature."""
        assert self.graph is not None
        shapes = [(signature[place][0], self.graph.inputs[own].shape) for place, own in self.given]
        pairs = [pair for both in shapes for pair in zip(*both, strict=True)]
        return any(not _is_symbol(mine) and mine != theirs for theirs, mine in pairs)

    def sizes(self, operands: Sequence[Any], leaves: Sequence[Any]) -> Sizes:
        """The sizes of some operands.

        Args:
            operands: operands of the graph.
            leaves: leaves of the arguments of the module.

        Raises:
            NotOfSizesError: if the graph does not serve them.
        """
        assert self.graph is not None
        places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self.given = tuple((places[id(one)], own) for own, one in enumerate(operands) if id(one) in places)
        return self._checked(list(zip(operands, self.graph.inputs, strict=True)))

    def _checked(self, pairs: Sequence[tuple[Any, Any]]) -> Sizes:
        """The sizes of values, given with fake tensors that have symbols."""
        assert self.graph is not None and self.graph.context.fake_mode is not None
        found = sizes_of(pairs, self.graph.context.fake_mode)
        for decision in self.decisions:
            if decision.place is None and not decision.at(found.number).holds(None):
                raise NotOfSizesError("a branch of the code goes another way")
        return found

    def at(self, operands: Sequence[Any], sizes: Sizes) -> tuple[DynamoGraph, list[Any]]:
        """The graph for some sizes, and fake tensors like its outputs."""
        assert self.graph is not None
        results = [
            sizes.tensor(node.meta["example_value"]) if isinstance(node, fx.Node) else sizes.number(node)
            for node in outputs_of(self.graph.gm)
        ]
        made = replace(
            self.graph,
            gm=copied(self.graph.gm),
            inputs=tuple(operands),
            context=TracingContext(self.graph.context.fake_mode),
            traces=[],
            at_sizes=lambda around: self._trace_at(around, sizes),
        )
        return made, results

    def _trace_at(self, around: Surroundings, sizes: Sizes) -> KeptTrace | None:
        if any(around.strides.values()):
            return None
        now = around, backward_in_autocast()
        known = next((trace for *then, trace in self.traces if tuple(then) == now), None)
        if known is None:
            assert self.graph is not None
            with symbols_computed_once():
                known = trace_with_symbols(self.graph, around)
            if known is None:
                return None
            self.traces.append((*now, known))
        return trace_at_sizes(known, sizes)


def symbolic_call(
    model: nn.Module, signature: Signature, varying: Mapping[int, Sequence[int]], settings: CallSettings
) -> SymbolicCall:
    """Prepares a call for many sizes; nothing is traced yet.

    Args:
        model: the module.
        signature: signature of the call.
        varying: the sizes that are symbols, by place of an input among the leaves of the arguments.
        settings: how the call is turned into a graph.
    """
    made = SymbolicCall(model=model, signature=signature, varying=varying)
    made.call = call_by_dynamo(
        model, made.backend, replace(settings, decisions=made.decisions, varying=varying, fullgraph=True)
    )
    return made


def recorded_at_sizes(
    symbolic: SymbolicCall, into: Recording, of: Source, decisions: list[Decision] | None
) -> Callable[..., Any]:
    """The call of the module for one combination of sizes, whose graph is recorded; takes the module's arguments.

    Args:
        symbolic: the call for many sizes.
        into: the recording.
        of: the module.
        decisions: branches on inputs that the call is made for are added here.
    """
    made: list[Callable[..., Any]] = []

    def serve(leaves: Sequence[Any], operands: tuple[Any, ...]) -> Any:
        if not made:
            sizes = symbolic.sizes(operands, leaves)
            graph, results = symbolic.at(operands, sizes)
            made.append(record_ready(into, of, graph, no_views, results))
            if decisions is not None:
                decisions.extend(d.at(sizes.number) for d in symbolic.decisions if d.place is not None)
        return made[0](*operands)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = () if made else pytree.tree_leaves((args, kwargs))
        token = _SERVING.set(_Serving(run=functools.partial(serve, leaves), captures=not made))
        try:
            with contextlib.nullcontext() if symbolic.graph else symbols_computed_once():
                return symbolic.call(*args, **kwargs)
        finally:
            _SERVING.reset(token)

    return run


def _is_symbol(size: Any) -> bool:
    """Whether a size is a symbol, or made of some, and not fixed by the code of the module."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _sizes_from_tensors(gm: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The graph that takes only tensors and reads sizes from them, and the places of the inputs that it takes.

    Raises:
        NotOfSizesError: if a symbol is the size of no input.
    """
    gm = copied(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta["example_value"] for node in placeholders]
    sources: dict[Any, tuple[fx.Node, int]] = {}
    for node, value in zip(placeholders, values, strict=True):
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for dimension, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                sources.setdefault(size.node.expr, (node, dimension))
    kept: list[int] = []
    for place, (node, value) in enumerate(zip(placeholders, values, strict=True)):
        if not isinstance(value, torch.SymInt):
            kept.append(place)
            continue
        source = sources.get(value.node.expr)
        if source is None:
            raise NotOfSizesError(f"{value} is the size of no input")
        with gm.graph.inserting_after(placeholders[-1]):
            read = gm.graph.call_function(torch.ops.aten.sym_size.int, source)
        read.meta = dict(node.meta)
        node.replace_all_uses_with(read)
        gm.graph.erase_node(node)
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymBool | torch.SymFloat):
            if node.meta["example_value"].node.has_hint():
                del node.meta["example_value"]  # a size is no number that the graph reads from a tensor
    gm.recompile()
    return gm, tuple(kept)
