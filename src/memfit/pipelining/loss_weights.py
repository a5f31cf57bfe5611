"""What the loss of each micro-batch counts, so that together they are the loss of the batch.

A loss that is a sum over samples counts once. A mean counts by the share of what it is a mean of: samples, or targets
that are not ignored, or their class weights. Which one it is, is read off the graph of the loss; what a mean divides by
must depend on inputs alone. Anything else would change with the number of micro-batches and is refused.

Training loops long got this wrong: a mean over the tokens of each micro-batch weighs tokens of short sequences more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from memfit.errors import CaptureError
from memfit.pipelining.forward_graph import ForwardGraph
from memfit.pipelining.stages import cut_into_stages

__all__ = ["LossReading", "Normaliser", "loss_normalisers", "loss_shares", "read_loss", "weights_of"]

_aten = torch.ops.aten

_SAME = {
    *(_aten.neg.default, _aten.clone.default, _aten.view.default, _aten._to_copy.default, _aten.squeeze.default),
    *(_aten.alias.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
}
_MEAN, _SUM = 1, 2
_REDUCED = {
    _aten.mse_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.huber_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
    _aten.soft_margin_loss.default: 2,
}
"""Ops with a reduction, and the place of that argument."""
_NLL = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """What a loss divides by.

    Attributes:
        count: of a micro-batch, from the operands of the graph; None if that is in proportion to its samples.
    """

    count: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None


class _Sum:
    """A sum over samples: nothing to divide by."""


class _Constant:
    """Does not depend on the inputs."""


_Kind = Normaliser | _Sum | _Constant


def loss_normalisers(graph: fx.Graph, inputs: frozenset[str], trained: frozenset[str]) -> list[Normaliser] | None:
    """What the parts of a loss divide by.

    Args:
        graph: ops of model and loss; its first output is the loss.
        inputs: names of the placeholders of the step's inputs.
        trained: names of those of parameters that receive a gradient.

    Returns:
        One for each mean that the loss is made of; None for a sum.

    Raises:
        CaptureError: if the loss is neither, naming the op.
    """
    reader = _Reader(graph, inputs, trained)
    (output,) = graph.find_nodes(op="output")
    kinds = reader.read(output.args[0][0])
    if all(isinstance(kind, _Sum) for kind in kinds):
        return None
    if any(isinstance(kind, _Sum) for kind in kinds):
        raise CaptureError(_REFUSED.format("it adds a mean, or what does not depend on the batch, to a sum"))
    return [kind for kind in kinds if isinstance(kind, Normaliser)]


_REFUSED = (
    "the loss of a batch is not made of those of its micro-batches: {}; a pipeline takes sums and means over samples, "
    "or one micro-batch"
)


class _Reader:
    def __init__(self, graph: fx.Graph, inputs: frozenset[str], trained: frozenset[str]) -> None:
        self.graph = graph
        self.of_inputs: set[fx.Node] = set()
        self.of_trained: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder":
                self.of_inputs |= {node} if node.name in inputs else set()
                self.of_trained |= {node} if node.name in trained else set()
                continue
            self.of_inputs |= {node} if not self.of_inputs.isdisjoint(node.all_input_nodes) else set()
            self.of_trained |= {node} if not self.of_trained.isdisjoint(node.all_input_nodes) else set()

    def read(self, node: Any) -> list[_Kind]:
        """What a scalar is made of."""
        if not isinstance(node, fx.Node) or node not in self.of_inputs:
            return [_Constant()]
        target = node.target
        if target is operator.getitem and node.args[1] == 0 and node.all_input_nodes[0].target in _NLL:
            return self._of_nll(node.all_input_nodes[0])
        if target in _REDUCED:
            place = _REDUCED[target]
            reduction = node.args[place] if len(node.args) > place else _MEAN
            return [Normaliser()] if reduction == _MEAN else [_Sum()] if reduction == _SUM else self._refuse(node)
        if target is _aten.mean.default or (target is _aten.mean.dim and _is_scalar(node)):
            return [Normaliser()]
        if target is _aten.sum.default or (target is _aten.sum.dim_IntList and _is_scalar(node)):
            return [_Sum()]
        if not _is_scalar(node):
            return self._refuse(node)
        if target in _SAME:
            return self.read(node.args[0])
        if target in (_aten.add.Tensor, _aten.sub.Tensor):
            return [*self.read(node.args[0]), *self.read(node.args[1])]
        if target in (_aten.mul.Tensor, _aten.mul.Scalar):
            first, second = node.args[:2]
            constant = first if first not in self.of_inputs else second
            if constant not in self.of_inputs:
                return self.read(second if constant is first else first)
        if target in (_aten.div.Tensor, _aten.div.Scalar):
            return self._of_quotient(node)
        return self._refuse(node)

    def _of_quotient(self, node: fx.Node) -> list[_Kind]:
        above, below = node.args[:2]
        kinds = self.read(above)
        if not isinstance(below, fx.Node) or below not in self.of_inputs:
            return kinds
        if below in self.of_trained or not all(isinstance(kind, _Sum) for kind in kinds):
            return self._refuse(node)
        return [Normaliser(count=self._made_of_inputs(below))]

    def _of_nll(self, node: fx.Node) -> list[_Kind]:
        _, target, weight, reduction, ignored = cast(Any, node.args[:5])
        if reduction == _SUM:
            return [_Sum()]
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

        return [Normaliser(count=count)]

    def _made_of_inputs(self, node: Any) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
        """What computes a node from the graph's operands."""
        needed: dict[fx.Node, None] = {}

        def visit(one: fx.Node) -> None:
            for operand in one.all_input_nodes:
                if operand not in needed:
                    visit(operand)
            needed[one] = None

        visit(node)
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

    def _refuse(self, node: fx.Node) -> list[_Kind]:
        where = (node.stack_trace or "").strip().splitlines()[-1:]
        raise CaptureError(_REFUSED.format(f"it ends in {node.target} {' '.join(map(str.strip, where))}".strip()))


def weights_of(
    normalisers: Sequence[Sequence[Normaliser] | None],
    operands: Sequence[Mapping[str, torch.Tensor]],
    sizes: Sequence[int],
) -> list[float]:
    """What the loss of each micro-batch counts.

    Args:
        normalisers: for each micro-batch what `loss_normalisers` says of the graph made for its size.
        operands: for each micro-batch the operands of that graph.
        sizes: the samples of each micro-batch.

    Returns:
        One weight each; all 1 for a sum.

    Raises:
        CaptureError: if parts of the loss divide by different things.
    """
    means = [of for of in normalisers if of is not None]
    if len(means) < len(sizes):
        return [1.0] * len(sizes)
    found: list[list[float]] = []
    for of_each in zip(*means, strict=True):
        if of_each[0].count is None:
            counts = [float(size) for size in sizes]
        else:
            counts = [float(one.count(here)) for one, here in zip(of_each, operands, strict=True) if one.count]
            if not all(counts):
                raise CaptureError(
                    f"micro-batch {counts.index(0.0)} has no target that counts, so its mean is not defined; shuffle "
                    "the batch, or use fewer micro-batches"
                )
        total = sum(counts)
        found.append([count / total for count in counts])
    if not found:
        return [size / sum(sizes) for size in sizes]
    for other in found[1:]:
        if any(abs(a - b) > 1e-12 for a, b in zip(found[0], other, strict=True)):
            raise CaptureError(
                _REFUSED.format(f"its parts are means over different numbers of things (shares {found[0]} and {other})")
            )
    return found[0]


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReading:
    """How the loss of micro-batches of one size is read.

    Attributes:
        normalisers: what it divides by; None for a sum.
        names: for each leaf of the inputs its placeholder in the graph of the loss.
        states: the model's tensors, by their placeholders.
    """

    normalisers: list[Normaliser] | None
    names: Mapping[int, str]
    states: Mapping[str, torch.Tensor]


def read_loss(forward: ForwardGraph, leaves: Sequence[Any]) -> LossReading:
    """Reads what the loss of a model divides by.

    Args:
        forward: the model and its loss, traced on one micro-batch.
        leaves: the inputs of that micro-batch.

    Raises:
        CaptureError: if the loss is no sum and no mean over samples.
    """
    (whole,) = cut_into_stages(forward, [])
    own = [getattr(whole.module, name) for name in whole.module.names]
    operands = [*own, *(leaves[place] for place in whole.leaves)]
    traced = make_fx(whole.module.calls, tracing_mode="fake", _allow_non_fake_inputs=True)(*operands)
    placeholders = list(traced.graph.find_nodes(op="placeholder"))
    names = {leaf: placeholders[len(own) + place].name for place, leaf in enumerate(whole.leaves)}
    trained = frozenset(node.name for node, tensor in zip(placeholders, own, strict=False) if tensor.requires_grad)
    return LossReading(
        normalisers=loss_normalisers(traced.graph, frozenset(names.values()), trained),
        names=names,
        states={node.name: tensor for node, tensor in zip(placeholders, own, strict=False)},
    )


def loss_shares(losses: Sequence[LossReading], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> list[float]:
    """What the loss of each micro-batch counts; see `weights_of`."""
    operands = [
        {**loss.states, **{name: part[place] for place, name in loss.names.items()}}
        for loss, part in zip(losses, parts, strict=True)
    ]
    return weights_of([loss.normalisers for loss in losses], operands, sizes)
