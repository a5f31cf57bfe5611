"""The captured graphs of a step, in the order of the forward pass: one, or several where the graph breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memfit.capture.distributed.fsdp import Gathered
from memfit.capture.dynamo.dynamo_call import DynamoCall
from memfit.capture.dynamo.traced_graph import JointTrace
from memfit.capture.gradients.autograd_graph import edges_behind
from memfit.capture.gradients.shared_inputs import SharedInputs, shared_inputs
from memfit.capture.gradients.tangents import GradientStrides, Strides, layouts_between
from memfit.capture.loss.reading import LossReading
from memfit.capture.subgraph_boundaries import Handed
from memfit.capture.unplanned_parts import NOTHING_PLAIN, PlainParts
from memfit.fxir.joint import JointReading
from memfit.torch_compat.core import pytree

__all__ = [
    "Operand",
    "Subgraph",
    "Subgraphs",
    "gradient_outputs_of",
    "gradient_strides_of",
    "inputs_shared_in",
    "tensors_in",
    "unreached_in",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Identity of a tensor that a subgraph took or returned, which is known after the tensor is freed.

    Attributes:
        tensor: identifies the tensor among those of a capture.
        storage: identifies the storage of the tensor.
        is_leaf: whether it is a leaf of the autograd graph.
        requires_grad: whether it receives a gradient.
    """

    tensor: int
    storage: int
    is_leaf: bool
    requires_grad: bool

    @staticmethod
    def of(value: Any) -> Operand | None:
        """The identity of a tensor; None for another value."""
        if not isinstance(value, torch.Tensor):
            return None
        return Operand(
            tensor=id(value),
            storage=value.untyped_storage()._cdata,
            is_leaf=value.is_leaf,
            requires_grad=value.requires_grad,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """One captured graph.

    Attributes:
        reading: ops and storages read from its joint graph.
        trace: the joint graph; None where it is not traced yet.
        inputs: the real tensors it takes, in the order of its placeholders.
        handed: its outputs during the capture, fake or real.
        took: identities of the inputs, once the inputs are dropped.
        gave: identities of the results, once the results are dropped.
        gathered: the units of a sharded module that were gathered while it ran.
        key: key of its graph (`memfit.capture.dynamo.dynamo_graph.graph_key`); empty for the only graph.
        terms: by place of an input, the number of terms that its gradient is the sum of, where there are several.
        returned: places of the inputs that it returns.
        weights: places of the outputs that are computed from the module's own tensors alone.
    """

    reading: JointReading
    inputs: tuple[Any, ...]
    handed: Handed
    trace: JointTrace | None = None
    took: tuple[Operand | None, ...] = ()
    gave: tuple[Operand | None, ...] = ()
    gathered: tuple[Gathered, ...] = ()
    key: str = ""
    terms: Mapping[int, int] = field(default_factory=dict)
    returned: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Results that the subgraph returned."""
        return self.handed.outputs

    def without_tensors(self) -> Subgraph:
        """The same subgraph, with identities in place of its inputs and results."""
        took, gave = (tuple(map(Operand.of, values)) for values in (self.inputs, self.outputs))
        return replace(self, took=took, gave=gave, inputs=(), handed=Handed(outputs=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraphs:
    """All graphs of a step, in forward order, and the module's output.

    Attributes:
        subgraphs: one for each captured graph.
        output: the module's output, fake or real.
        breaks: why the graph breaks, if it does.
        between_bytes: bytes that plain autograd saves for the code between subgraphs.
        staying: the units of a sharded module that were still gathered after it ran.
        plain: the parts that are left to plain code.
        replaced: whether the model's own checkpoints are left out.
        call: the call that Dynamo compiled, which plans of the step run; None for a sharded module.
        loss: how the loss uses the output and the unreturned outputs (see `receivers`), if the loss was read.
        gradient_outputs: which outputs of the last graph receive gradients; None for all.
        gradient_strides: strides of gradients of the graphs' outputs, where they differ from those of the outputs.
        shared: inputs with several uses that the graphs must take once per use (`inputs_shared_in`).
        unreached: outputs of earlier graphs that no gradient of the loss reaches (`unreached_in`).
        cut_between: those of the unreached outputs that are detached.
    """

    subgraphs: tuple[Subgraph, ...]
    output: Any
    breaks: tuple[str, ...] = ()
    between_bytes: int = 0
    staying: tuple[Gathered, ...] = ()
    plain: PlainParts = NOTHING_PLAIN
    replaced: bool = False
    call: DynamoCall | None = None

    @property
    def last_key(self) -> str | None:
        """The key of the last subgraph's graph, None if an earlier subgraph has the same key."""
        keys = [subgraph.key for subgraph in self.subgraphs]
        return keys[-1] if keys.count(keys[-1]) == 1 else None

    loss: LossReading | None = None
    gradient_outputs: frozenset[int] | None = None
    gradient_strides: GradientStrides = field(default_factory=dict)
    shared: SharedInputs = field(default_factory=dict)
    unreached: Mapping[str, frozenset[int]] = field(default_factory=dict)
    cut_between: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def receivers(self) -> list[torch.Tensor]:
        """The tensors of the output, then outputs of the last subgraph that are not returned and need a gradient.

        The module does not return them: hooks collect features, and a forward pass leaves an auxiliary loss on `self`.
        A weight that the forward pass computes and leaves on `self` is not one of them.
        """
        returned = tensors_in(self.output)
        last = self.subgraphs[-1]
        known = {id(t) for t in returned} | {id(last.outputs[place]) for place in last.weights}
        beside = [t for t in tensors_in(last.outputs) if t.requires_grad and id(t) not in known]
        return [*returned, *beside]


def gradient_strides_of(subgraphs: Subgraphs) -> list[dict[int, Strides]]:
    """For each subgraph, the strides of the gradients of those outputs that receive a gradient."""
    if any(subgraph.gathered for subgraph in subgraphs.subgraphs):
        return [{} for _ in subgraphs.subgraphs]  # hooks of a sharded module would communicate
    assert subgraphs.loss is not None
    known = chain(subgraphs.loss.gradient_strides, repeat(None))  # nothing is known without a loss
    received = zip(subgraphs.receivers(), subgraphs.loss.receives_gradient, known, strict=False)
    ends = [(tensor, strides) for tensor, receives, strides in received if receives]
    wanted = [_receiving(subgraph) for subgraph in subgraphs.subgraphs]
    lying = iter(layouts_between(ends, [where for receiving in wanted for where in receiving.values()]))
    found: list[dict[int, Strides]] = []
    for receiving in wanted:
        of_outputs = dict(zip(receiving, lying, strict=False))
        found.append({place: strides for place, strides in of_outputs.items() if strides is not None})
    return found


def _receiving(subgraph: Subgraph) -> dict[int, torch.Tensor | GradientEdge]:
    """By place of an output of a subgraph, the tensor or edge where its gradient arrives."""
    node = subgraph.handed.node
    if node is not None:
        return {place: GradientEdge(node, result) for place, result in subgraph.handed.result_of.items()}
    outputs = enumerate(subgraph.outputs)
    return {place: value for place, value in outputs if isinstance(value, torch.Tensor) and value.requires_grad}


def gradient_outputs_of(subgraphs: Subgraphs) -> frozenset[int] | None:
    """Places of the last subgraph's outputs that receive gradients; None if all outputs do that can."""
    assert subgraphs.loss is not None
    receives = zip(subgraphs.receivers(), subgraphs.loss.receives_gradient, strict=True)
    reached = {id(t) for t, does in receives if does}
    # Tensors that Dynamo's epilogue makes cannot be followed back to outputs; then every output counts.
    last = subgraphs.subgraphs[-1].outputs
    if not reached <= {id(o) for o in last}:
        return None
    wanted = frozenset(i for i, o in enumerate(last) if id(o) in reached)
    possible = frozenset(i for i, o in enumerate(last) if isinstance(o, torch.Tensor) and o.requires_grad)
    return None if wanted == possible else wanted


def unreached_in(subgraphs: Subgraphs, loss: LossReading) -> Mapping[str, frozenset[int]]:
    """By graph except the last, the outputs that no gradient of the loss reaches in any run of the graph."""
    received = zip(subgraphs.receivers(), loss.receives_gradient, strict=False)
    reached = edges_behind(tensor for tensor, receives in received if receives)
    found: dict[str, frozenset[int]] = {}
    for subgraph in subgraphs.subgraphs:
        results = subgraph.handed.result_of.items()
        without = frozenset(place for place, result in results if (subgraph.handed.node, result) not in reached)
        found[subgraph.key] = found.get(subgraph.key, without) & without
    return {key: places for key, places in found.items() if places and key != subgraphs.last_key}


def inputs_shared_in(subgraphs: Subgraphs, *, by_use: bool) -> SharedInputs:
    """Finds the inputs with several uses that graphs must take once per use, because later code uses them too.

    Args:
        subgraphs: as captured.
        by_use: whether graphs take all inputs with several uses once per use.
    """
    if not any(subgraph.terms for subgraph in subgraphs.subgraphs):
        return {}
    handed = [(p.key, p.handed, p.terms) for p in subgraphs.subgraphs if p.handed.node is not None]
    shared = {key: dict(of_graph) for key, of_graph in shared_inputs(handed, subgraphs.receivers()).items()}
    returned = _receiving_ids(subgraphs)
    for subgraph in subgraphs.subgraphs:
        terms = {p: n for p, n in subgraph.terms.items() if by_use or _is_returned(subgraph, p, returned)}
        if terms:
            shared[subgraph.key] = shared.get(subgraph.key, {}) | terms
    return shared


def _receiving_ids(subgraphs: Subgraphs) -> set[int]:
    """Ids of the receivers to which the loss brings a gradient."""
    receives = () if subgraphs.loss is None else subgraphs.loss.receives_gradient
    return {id(tensor) for tensor, does in zip(subgraphs.receivers(), receives, strict=False) if does}


def _is_returned(subgraph: Subgraph, place: int, returned: set[int]) -> bool:
    """Whether the only subgraph, or the module, returns an input; for several subgraphs the autograd graph tells."""
    return subgraph.handed.node is None and (place in subgraph.returned or id(subgraph.inputs[place]) in returned)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested output."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
