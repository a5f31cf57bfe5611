"""A model and its loss as ops, for micro-batches of one size; the parts of the loss are read from these ops.

The forward graph has calls as they are written, and a call may hide any op. A second trace with fake tensors turns the
calls into ops with known meaning. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from memfit.pipelining.loss.microbatches import first_samples
from memfit.pipelining.partition.forward_graph import ForwardGraph, PipelineLoss, capture_forward
from memfit.pipelining.partition.stages import cut_into_stages
from memfit.torch_compat.core import make_fx

__all__ = ["TracedLoss", "TracedLosses", "trace_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLoss:
    """Model and loss as ops.

    Attributes:
        graph: a placeholder for each of the model's tensors and the inputs.
        leaves: for each leaf of the inputs, its placeholder.
        states: the model's tensors, by the names of their placeholders.
    """

    graph: fx.Graph
    leaves: Mapping[int, fx.Node]
    states: Mapping[str, torch.Tensor]

    @property
    def loss(self) -> fx.Node:
        """The node of the loss."""
        (output,) = self.graph.find_nodes(op="output")
        found: fx.Node = output.args[0][0]
        return found

    def trained(self) -> frozenset[str]:
        """Names of the placeholders of tensors that receive a gradient."""
        return frozenset(name for name, tensor in self.states.items() if tensor.requires_grad)


@dataclass(slots=True, kw_only=True)
class TracedLosses:
    """Model and loss as ops for several numbers of samples of a batch, each traced once.

    Attributes:
        model: the model.
        loss_fn: the loss.
        leaves: the inputs of the batch.
        spec: the tree of the inputs, to put the leaves together.
        known: traced losses, by the number of samples.
    """

    model: nn.Module
    loss_fn: PipelineLoss | None
    leaves: Sequence[Any]
    spec: Any
    known: dict[int, TracedLoss] = field(default_factory=dict)

    def of(self, samples: int, forward: tuple[ForwardGraph, Sequence[Any]] | None = None) -> TracedLoss:
        """Model and loss on the first samples of the batch, or as traced on the same number of others (`forward`)."""
        if samples not in self.known:
            self.known[samples] = trace_loss(*(forward or self._first(samples)))
        return self.known[samples]

    def _first(self, samples: int) -> tuple[ForwardGraph, Sequence[Any]]:
        few = first_samples(self.leaves, samples)
        args, kwargs, target = self.spec.unflatten(few)
        return capture_forward(self.model, args, kwargs, target, self.loss_fn), few


def trace_loss(forward: ForwardGraph, leaves: Sequence[Any]) -> TracedLoss:
    """Traces the ops of a model and its loss.

    Args:
        forward: the model and its loss, traced on one micro-batch.
        leaves: the inputs of that micro-batch.
    """
    (whole,) = cut_into_stages(forward, [])
    own = [getattr(whole.module, name) for name in whole.module.names]
    operands = [*own, *(leaves[place] for place in whole.leaves)]
    traced = make_fx(whole.module.calls, tracing_mode="fake", _allow_non_fake_inputs=True)(*operands)
    placeholders = list(traced.graph.find_nodes(op="placeholder"))
    return TracedLoss(
        graph=traced.graph,
        leaves=dict(zip(whole.leaves, placeholders[len(own) :], strict=True)),
        states={node.name: tensor for node, tensor in zip(placeholders, own, strict=False)},
    )
