"""Weights of the losses of micro-batches, such that the weighted losses add up to the loss of the batch.

A loss that is a sum over samples has weight 1. A mean has the micro-batch's share of its divisor as its weight: the
number of samples, or of targets that are not ignored, or the sum of their class weights. The kind of loss is read from
its graph; the divisor of a mean must depend on inputs alone. Any other loss would change with the number of
micro-batches and is refused.

Training loops got this wrong for a long time: a mean over the tokens of each micro-batch gives tokens of short
sequences more weight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isclose
from typing import Any, cast

import torch
from torch import fx, nn

from memfit.errors import CaptureError
from memfit.ops.registry import rule_of
from memfit.pipelining.loss.traced import TracedLoss
from memfit.torch_compat.core import OpOverload

__all__ = ["Kind", "LossReading", "Part", "loss_shares", "read_loss", "totals"]

_aten = torch.ops.aten

_SAME = (_aten.neg.default, _aten.clone.default, _aten._to_copy.default, _aten.reshape.default)
"""Ops, in addition to views, that keep a number up to its sign."""

_MEAN, _SUM = 1, 2
_NLL = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)


class Kind(StrEnum):
    """Kind of a part of a loss."""

    SUM = "sum"
    """Sum over samples: its weight is 1."""

    MEAN = "mean"
    """Mean over samples, or over a number in proportion to them."""

    COUNTED = "counted"
    """Divided by a count that is computed from the inputs."""

    CONSTANT = "constant"
    """Independent of the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the terms that a loss adds.

    Attributes:
        kind: sum, mean, counted or constant.
        scale: its factor, if that is a number in the graph; the number may be the size of the batch.
        count: from the operands of the graph for a micro-batch to the divisor.
    """

    kind: Kind
    scale: float = 1.0
    count: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None


_REFUSED = (
    "the loss of a batch is not made of those of its micro-batches: {}; a pipeline takes sums and means over samples, "
    "or one micro-batch"
)


class _Reader:
    """Reads the parts of a loss from its graph.

    Attributes:
        parts: of the loss.
        totals: the ops that add up the loss, and the ops that compute its divisors.
    """

    def __init__(self, traced: TracedLoss) -> None:
        self.totals: set[fx.Node] = set()
        self.of_inputs: set[fx.Node] = set(traced.leaves.values())
        self.of_trained: set[fx.Node] = set()
        trained = traced.trained()
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                self.of_trained |= {node} if node.name in trained else set()
                continue
            self.of_inputs |= {node} if not self.of_inputs.isdisjoint(node.all_input_nodes) else set()
            self.of_trained |= {node} if not self.of_trained.isdisjoint(node.all_input_nodes) else set()
        self.parts = self.read(traced.loss)

    def read(self, node: Any) -> list[Part]:
        """Reads the parts that add up to a scalar."""
        if not isinstance(node, fx.Node) or node not in self.of_inputs:
            return [Part(kind=Kind.CONSTANT)]
        self.totals.add(node)
        target = node.target
        if target is operator.getitem and node.args[1] == 0:
            return self.read(node.args[0])
        if target in _NLL:
            return self._of_nll(node)
        reduction = _reduction(node)
        if reduction is not None:
            kinds = {_MEAN: Kind.MEAN, _SUM: Kind.SUM}
            return [Part(kind=kinds[reduction])] if reduction in kinds else self._refuse(node)
        if target is _aten.mean.default or (target is _aten.mean.dim and _is_scalar(node)):
            return [Part(kind=Kind.MEAN)]
        if target is _aten.sum.default or (target is _aten.sum.dim_IntList and _is_scalar(node)):
            return [Part(kind=Kind.SUM)]
        if not _is_scalar(node):
            return self._refuse(node)
        if target in _SAME or rule_of(target).view is not None:
            return self.read(node.args[0])
        if target in (_aten.add.Tensor, _aten.sub.Tensor):
            return [*self.read(node.args[0]), *self.read(node.args[1])]
        if target in (_aten.mul.Tensor, _aten.mul.Scalar):
            first, second = node.args[:2]
            constant = first if first not in self.of_inputs else second
            if constant not in self.of_inputs:
                return _scaled(self.read(second if constant is first else first), constant)
        if target in (_aten.div.Tensor, _aten.div.Scalar):
            return self._of_quotient(node)
        return self._refuse(node)

    def _of_quotient(self, node: fx.Node) -> list[Part]:
        above, below = node.args[:2]
        parts = self.read(above)
        if not isinstance(below, fx.Node) or below not in self.of_inputs:
            return _scaled(parts, 1 / below if isinstance(below, int | float) else below)
        if below in self.of_trained or not all(part.kind is Kind.SUM for part in parts):
            return self._refuse(node)
        return [replace(part, kind=Kind.COUNTED, count=self._made_of_inputs(below)) for part in parts]

    def _of_nll(self, node: fx.Node) -> list[Part]:
        _, target, weight, reduction, ignored = cast(Any, node.args[:5])
        if reduction == _SUM:
            return [Part(kind=Kind.SUM)]
        if reduction != _MEAN or target in self.of_trained or weight in self.of_trained:
            return self._refuse(node)
        targets = self._made_of_inputs(target)
        weights = self._made_of_inputs(weight) if weight is not None else None

        def count(operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
            classes = targets(operands)
            counted = classes.ne(ignored)
            if weights is None:
                return counted.sum()
            return weights(operands)[classes.where(counted, 0)].mul(counted).sum()

        return [Part(kind=Kind.COUNTED, count=count)]

    def _made_of_inputs(self, node: Any) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
        """Function that computes a node from the graph's operands."""
        needed: dict[fx.Node, None] = {}

        def visit(one: fx.Node) -> None:
            for operand in one.all_input_nodes:
                if operand not in needed:
                    visit(operand)
            needed[one] = None

        visit(node)
        self.totals.update(needed)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        names = [one.name for one in needed if one.op == "placeholder"]
        for one in needed:
            copies[one] = graph.node_copy(one, copies.__getitem__)
        graph.output(copies[node])
        module = fx.GraphModule(nn.Module(), graph)

        def made(operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                result: torch.Tensor = module(*(operands[name] for name in names))
            return result

        return made

    def _refuse(self, node: fx.Node) -> list[Part]:
        where = (node.stack_trace or "").strip().splitlines()[-1:]
        raise CaptureError(_REFUSED.format(f"it ends in {node.target} {' '.join(map(str.strip, where))}".strip()))


def _reduction(node: fx.Node) -> int | None:
    """The reduction of an op that is a loss of PyTorch; None if the op is not such a loss."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    arguments = node.target._schema.arguments
    given: dict[str, Any] = dict(zip((argument.name for argument in arguments), node.args, strict=False))
    given |= node.kwargs
    return next((given.get(a.name, a.default_value) for a in arguments if a.name == "reduction"), None)


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _scaled(parts: list[Part], by: Any) -> list[Part]:
    """Parts multiplied by a number; a tensor that is the same for all inputs changes nothing in them."""
    return [replace(part, scale=part.scale * by) for part in parts] if isinstance(by, int | float) else parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReading:
    """The parts of the loss of micro-batches of one size.

    Attributes:
        parts: the terms that it adds.
        names: for each leaf of the inputs, its placeholder in the graph of the loss.
        states: the model's tensors, by their placeholders.
    """

    parts: tuple[Part, ...]
    names: Mapping[int, str]
    states: Mapping[str, torch.Tensor]

    @property
    def is_settled(self) -> bool:
        """Whether no number in it could be the size of the batch."""
        return all(part.scale == 1.0 or part.kind is Kind.CONSTANT for part in self.parts)

    def settled(self, other: LossReading, times: float) -> LossReading:
        """Finds the numbers that are the size of the batch, by comparison with the loss of another number of samples.

        `cross_entropy(o, y, reduction="sum") / len(y)` is a mean, although the graph has a number for `len(y)`.

        Args:
            other: the same loss, for `times` times as many samples.
            times: number of samples of `other` over that of this loss.

        Raises:
            CaptureError: if a number depends on the size in another way.
        """
        if len(self.parts) != len(other.parts):
            raise CaptureError(_REFUSED.format("it is another one for another number of samples"))
        pairs = zip(self.parts, other.parts, strict=True)
        return replace(self, parts=tuple(_settled(here, there.scale / here.scale, times) for here, there in pairs))


def _settled(part: Part, changes: float, times: float) -> Part:
    turned = {(Kind.SUM, 1 / times): Kind.MEAN, (Kind.MEAN, times): Kind.SUM}
    for (kind, change), becomes in turned.items():
        if part.kind is kind and isclose(changes, change, rel_tol=1e-9):
            return replace(part, kind=becomes, scale=1.0)
    if not isclose(changes, 1.0, rel_tol=1e-9) and part.kind is not Kind.CONSTANT:
        raise CaptureError(
            _REFUSED.format(f"a number in it changes {changes:.3g} times with {times:.3g} times the samples")
        )
    return replace(part, scale=1.0)


def read_loss(traced: TracedLoss) -> LossReading:
    """Reads the terms that the loss adds.

    Raises:
        CaptureError: if the loss is neither a sum nor a mean over samples.
    """
    names = {leaf: node.name for leaf, node in traced.leaves.items()}
    return LossReading(parts=tuple(_Reader(traced).parts), names=names, states=traced.states)


def totals(traced: TracedLoss) -> frozenset[fx.Node]:
    """The ops that add up the loss, and the ops that compute its divisors.

    Raises:
        CaptureError: see `read_loss`.
    """
    return frozenset(_Reader(traced).totals)


def loss_shares(losses: Sequence[LossReading], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> list[float]:
    """Weight of each micro-batch's loss in the loss of the batch.

    Args:
        losses: for each micro-batch the parts of its loss, settled.
        parts: for each micro-batch the leaves of its inputs.
        sizes: the number of samples of each micro-batch.

    Returns:
        One weight for each micro-batch; all 1 for a sum.

    Raises:
        CaptureError: if the loss of the batch is not a weighted sum of the losses of its micro-batches.
    """
    operands = [
        {**loss.states, **{name: part[place] for place, name in loss.names.items()}}
        for loss, part in zip(losses, parts, strict=True)
    ]
    found: list[list[float]] = []
    for of_each in zip(*(loss.parts for loss in losses), strict=True):
        kind = of_each[0].kind
        if kind is Kind.SUM:
            found.append([1.0] * len(sizes))
        elif kind is Kind.MEAN:
            found.append(_shares([float(size) for size in sizes]))
        elif kind is Kind.COUNTED:
            counts = [float(part.count(here)) for part, here in zip(of_each, operands, strict=True) if part.count]
            found.append(_shares(counts))
        else:  # a constant counts once if the shares add up to one
            found.append([])
    shares = next((one for one in found if one), _shares([float(size) for size in sizes]))
    for other in found:
        if other and any(abs(a - b) > 1e-12 for a, b in zip(shares, other, strict=True)):
            raise CaptureError(
                _REFUSED.format(
                    f"it adds means over different numbers of things, or a mean and a sum ({shares}, {other})"
                )
            )
    if [] in found and abs(sum(shares) - 1.0) > 1e-9:
        raise CaptureError(_REFUSED.format("it adds what does not depend on the batch to a sum"))
    return shares


def _shares(counts: list[float]) -> list[float]:
    if not all(counts):
        raise CaptureError(
            f"micro-batch {counts.index(0.0)} has no target that counts, so its mean is not defined; shuffle the "
            "batch, or use fewer micro-batches"
        )
    return [count / sum(counts) for count in counts]
