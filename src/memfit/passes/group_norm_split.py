"""Splits group and instance normalisation, so that each half runs tile by tile (lever `tile`).

Both normalise each sample separately, with moments over its whole space, so a tile alone cannot be normalised. After
the split, sums over space are added up tile by tile (`sums_of_space`), scale and shift of every channel of every sample
follow from these sums (`scale_and_shift`), and one multiplication and one addition per element remain, as in PyTorch's
own kernel. The backward pass is split in the same way: two sums (`products_over_space`), then the gradients of weight
and bias and two more numbers per channel (`gradients_from_products`), and then the input's gradient, which is linear in
both tensors (`input_gradient`).

The sums of single samples are rows of one tensor for the batch; each slice gets the indices of the rows that it adds to
as another operand. Sums are in float64.

Known limits: for tiles only, since the native kernels process samples one by one anyway; instance normalisation only
without running statistics.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from memfit.ops.kernels.group_norm import (
    gradients_from_products,
    input_gradient,
    products_over_space,
    scale_and_shift,
    scaled_and_shifted,
    sums_of_space,
)
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["split_group_norm"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """A normalisation of samples, with its backward pass.

    Attributes:
        forward: the call.
        result: the node that holds its result, with the shape of `data`.
        data: the normalised operand, of shape [N, C, *].
        weight: one number per channel.
        bias: one number per channel.
        groups: number of groups of channels.
        eps: added to variances.
        backward: the call of its backward pass, if there is one.
        gradient: gradient of its result, with the shape of `data`.
        of_data: the node that holds the gradient of `data`, with its shape.
        of_parameters: the nodes that hold the gradients of weight and bias, if they have any.
        by_sample: whether these gradients hold one part per sample, one after the other.
    """

    forward: fx.Node
    result: fx.Node
    data: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    groups: int
    eps: float
    backward: fx.Node | None
    gradient: fx.Node | None
    of_data: fx.Node | None
    of_parameters: tuple[fx.Node | None, fx.Node | None]
    by_sample: bool


def split_group_norm(module: fx.GraphModule) -> None:
    """Splits every group and instance normalisation into its sums, a few numbers, and the rest."""
    found = [
        norm
        for target, known in ((_aten.native_group_norm.default, _group), (_NO_STATISTICS, _instance))
        for node in module.graph.find_nodes(op="call_function", target=target)
        if (norm := known(node)) is not None and _is_splittable(norm)
    ]
    for norm in found:
        _split(module.graph, norm)


_NO_STATISTICS = _aten._native_batch_norm_legit.no_stats


def _is_splittable(norm: _Norm) -> bool:
    value = norm.data.meta["val"]
    return value.dim() > 2 and value.dtype in (torch.float32, torch.float64)


def _group(node: fx.Node) -> _Norm | None:
    data, weight, bias, _, _, _, groups, eps = cast(tuple[Any, ...], node.args)
    results = _results(node)
    if 0 not in results:
        return None
    backward = _only_reader(results, _aten.native_group_norm_backward.default)
    if backward is None or (isinstance(backward, fx.Node) and backward.args[1] is not data):
        return None
    made = _results(backward) if isinstance(backward, fx.Node) else {}
    return _Norm(
        forward=node,
        result=results[0],
        data=data,
        weight=weight,
        bias=bias,
        groups=groups,
        eps=eps,
        backward=backward if isinstance(backward, fx.Node) else None,
        gradient=cast(fx.Node, backward.args[0]) if isinstance(backward, fx.Node) else None,
        of_data=made.get(0),
        of_parameters=(made.get(1), made.get(2)),
        by_sample=False,
    )


def _instance(node: fx.Node) -> _Norm | None:
    """Recognises instance normalisation, a batch normalisation of one sample with the channels of all samples."""
    seen, weight, bias, training, _, eps = cast(tuple[Any, ...], node.args)
    results = _results(node)
    data = _viewed(seen)
    result = _only_view(results.get(0))
    if data is None or result is None or training is not True or not _alike(result, data):
        return None
    samples, channels = data.meta["val"].shape[:2]
    one_sample = seen.meta["val"].shape[0] == 1 and seen.meta["val"].shape[1] == samples * channels
    factors = [_repeated(n, samples) for n in (weight, bias)]
    backward = _only_reader(results, _aten.native_batch_norm_backward.default)
    unknown = any(f is None and n is not None for f, n in zip(factors, (weight, bias), strict=True))
    if not one_sample or backward is None or unknown:
        return None
    if not isinstance(backward, fx.Node):
        of_data = gradient = None
        made: Mapping[int, fx.Node] = {}
    else:
        made = _results(backward)
        gradient, of_data = _viewed(cast(fx.Node, backward.args[0])), _only_view(made.get(0))
        known = gradient is not None and of_data is not None and _alike(gradient, data) and _alike(of_data, data)
        if backward.args[1] is not seen or not known:
            return None
    return _Norm(
        forward=node,
        result=result,
        data=data,
        weight=factors[0],
        bias=factors[1],
        groups=channels,
        eps=eps,
        backward=backward if isinstance(backward, fx.Node) else None,
        gradient=gradient,
        of_data=of_data,
        of_parameters=(made.get(1), made.get(2)),
        by_sample=True,
    )


def _results(node: fx.Node) -> dict[int, fx.Node]:
    return {cast(int, user.args[1]): user for user in node.users if user.target is operator.getitem}


def _only_reader(results: Mapping[int, fx.Node], target: Any) -> fx.Node | bool | None:
    """The normalisation's backward pass if only it reads the moments; False if no op does, None if other ops do."""
    readers = {reader for place, node in results.items() if place > 0 for reader in _readers(node)}
    if not readers:
        return False
    (first, *others) = readers
    return first if not others and first.target is target else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target is _aten.detach.default:
            yield from _readers(user)
        else:
            yield user


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that this one is a view of; None if it is no view."""
    return cast(fx.Node, node.args[0]) if node.target is _aten.view.default else None


def _only_view(node: fx.Node | None) -> fx.Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].target is _aten.view.default else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    return bool(one.meta["val"].shape == other.meta["val"].shape)


def _repeated(node: fx.Node | None, samples: int) -> fx.Node | None:
    if node is None or node.target is not _aten.repeat.default or list(cast(Sequence[int], node.args[1])) != [samples]:
        return None
    return cast(fx.Node, node.args[0])


def _split(graph: fx.Graph, norm: _Norm) -> None:
    value = norm.data.meta["val"]
    samples, axes, count = value.shape[0], value.dim() - 2, math.prod(value.shape[2:])

    def call(target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with detect_fake_mode(value) or nullcontext():
            made.meta = {**like.meta, "val": target(*values)}
        return made

    def taken(node: fx.Node, place: int) -> fx.Node:
        made = graph.call_function(operator.getitem, (node, place))
        made.meta = {**node.meta, "val": node.meta["val"][place]}
        return made

    def constant(target: Any, like: fx.Node) -> fx.Node:
        made = graph.call_function(target, ([value.shape[1]],), {"dtype": value.dtype, "device": value.device})
        with detect_fake_mode(value) or nullcontext():
            made.meta = {**like.meta, "val": value.new_empty(value.shape[1])}
        return made

    forward = norm.forward
    with graph.inserting_before(forward):
        numbers = graph.call_function(_aten.arange.default, (samples,), {"device": value.device, "pin_memory": False})
        with detect_fake_mode(value) or nullcontext():
            numbers.meta = {**forward.meta, "val": torch.arange(samples, device=value.device)}
        rows = call(_aten.view.default, (numbers, [samples, *(1,) * (axes + 1)]), forward)
        sums = call(sums_of_space, (norm.data, rows, samples), forward)
        weight = norm.weight or constant(_aten.ones.default, forward)
        bias = norm.bias or constant(_aten.zeros.default, forward)
        found = call(scale_and_shift, (sums, weight, bias, norm.groups, count, norm.eps, value.dtype, axes), forward)
        scale, shift, moments = (taken(found, place) for place in range(3))
        made = call(scaled_and_shifted, (norm.data, scale, shift), forward)
    replace_uses(norm.result, made)
    backward = norm.backward
    if backward is None:
        return
    with graph.inserting_before(backward):
        products = call(products_over_space, (norm.gradient, norm.data, rows, samples), backward)
        numbers_of = call(gradients_from_products, (products, moments, weight, count, value.dtype, axes), backward)
        *of_parameters, slope, offset = (taken(numbers_of, place) for place in range(4))
        operands = (norm.gradient, norm.data, scale, slope, offset)
        of_data = call(input_gradient, operands, backward)
    if norm.of_data is not None:
        replace_uses(norm.of_data, of_data)
    for old, by_sample in zip(norm.of_parameters, of_parameters, strict=True):
        if old is None:
            continue
        with graph.inserting_before(backward):
            if norm.by_sample:
                new = call(_aten.view.default, (by_sample, [-1]), old)
            else:
                new = call(_aten.sum.dim_IntList, (by_sample, [0]), old)
        replace_uses(old, new)
