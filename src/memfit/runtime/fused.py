"""Turns ops that run as one, slice of the batch by slice, into one call (`memfit.step.fusion`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from memfit.capture.again import Call
from memfit.capture.by_samples import Slice, in_slices, sliced_operands, sliced_target
from memfit.capture.joint import JointOp, JointReading, result_index

__all__ = ["FusedCall", "FusedOp", "fused_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """One of the ops.

    Attributes:
        op: which one; it has `by_samples`.
        from_statistics: whether what runs in its place later is called.
        handed_on: storages among its results that nothing reads after the ops, so that they exist as slices only.
        over: the storage whose memory its first result takes over, if any.
    """

    op: JointOp
    from_statistics: bool
    handed_on: tuple[int, ...]
    over: int | None

    @property
    def call(self) -> fx.Node | Call:
        """What is called."""
        return self.op.again if self.from_statistics and self.op.again is not None else self.op.node

    @property
    def writes(self) -> tuple[int, ...]:
        """Storages of its results."""
        return self.op.writes[:1] if self.from_statistics else self.op.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """The call that runs them.

    Attributes:
        target: what is called; it returns a tuple.
        operands: nodes of the joint graph.
        results: storages, one for each item of the tuple.
    """

    target: Callable[..., tuple[torch.Tensor, ...]]
    operands: tuple[fx.Node, ...]
    results: tuple[int, ...]


def fused_call(reading: JointReading, ops: Sequence[FusedOp]) -> FusedCall:
    """Builds the call for ops that follow each other."""
    graph = fx.Graph()
    made: dict[int, fx.Node] = {}
    operands: dict[tuple[fx.Node, bool], fx.Node] = {}
    for fused in ops:
        sliced = sliced_operands(fused.call)

        def value(node: fx.Node, sliced: frozenset[fx.Node] = sliced) -> fx.Node:
            storage = reading.storage_of.get(node)
            if storage in made:
                return made[storage]
            key = node, node in sliced
            if key not in operands:
                operands[key] = graph.placeholder(f"{node.name}_{len(operands)}")
            return operands[key]

        call = fused.call
        result = graph.call_function(sliced_target(call), fx.map_arg(call.args, value), fx.map_arg(call.kwargs, value))
        alone = isinstance(call.meta["val"], torch.Tensor)
        for storage in fused.writes:
            index = result_index(reading.storages[storage].base)
            if alone or index >= 0:
                made[storage] = result if alone else graph.call_function(operator.getitem, (result, index))
    position = {reading.storage_of.get(node): i for i, (node, by_samples) in enumerate(operands) if by_samples}
    over: dict[int, int] = {}
    for fused in ops:
        if fused.over is not None and fused.over not in position:  # what nothing reads only leaves its memory
            position[fused.over] = len(operands)
            base = reading.storages[fused.over].base
            operands[base, False] = graph.placeholder(f"{base.name}_{len(operands)}")
        if fused.over is not None:
            over[fused.writes[0]] = position[fused.over]
    handed_on = {s for fused in ops for s in fused.handed_on}
    sums = {s for fused in ops if fused.op.by_samples is not None for s in fused.op.by_samples.sums}
    results = tuple(s for s in made if s not in handed_on)
    graph.output(tuple(made[s] for s in results))

    slices = ops[0].op.by_samples
    assert slices is not None
    target = in_slices(
        Slice(
            run=fx.GraphModule(torch.nn.Module(), graph).forward,
            sliced={i for i, (_, by_samples) in enumerate(operands) if by_samples},
            batch=slices.batch,
            samples=slices.samples,
            results=[reading.storages[s].base.meta["val"] for s in results],
            over=[over.get(s) for s in results],
            sums={place for place, s in enumerate(results) if s in sums},
        )
    )
    return FusedCall(target=target, operands=tuple(node for node, _ in operands), results=results)
