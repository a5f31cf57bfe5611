"""Which ops can run on a few samples of the batch at a time, and how they do so together.

Most ops of a network treat each sample of the batch by itself: convolutions, activations, sums, pooling, and batch
normalisation once its statistics are known (`memfit.capture.again`). Ops that run again may therefore run as one,
slice of the batch by slice (`memfit.step.fusion`): `in_slices` is what the runtime calls for them.

The profiler compares slices of each op with the whole, for each shape, size of slice and alignment in memory, before a
plan relies on it.

Known limits: CPU; operands and results that have samples outside and own their memory, so no views between ops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.capture.again import Call, normalise

__all__ = ["Slice", "batch_of", "in_slices", "owns_memory", "samples_per_slice", "sliced_operands"]

_aten = torch.ops.aten

_SLICE_BYTES = 4 << 20
"""About the largest result of a slice: it fits a cache, and its work outweighs the call."""

_OF_FIRST = {
    _aten.convolution.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool3d.default,
    _aten._adaptive_avg_pool2d.default,
    _aten.upsample_nearest2d.vec,
    _aten.native_layer_norm.default,
    normalise,
}
"""Calls that take samples of their first operand and all of the others."""

_ELEMENT_BY_ELEMENT = {
    _aten.relu.default,
    _aten.leaky_relu.default,
    _aten.hardtanh.default,
    _aten.hardswish.default,
    _aten.hardsigmoid.default,
    _aten.neg.default,
    _aten.clone.default,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.mul.Tensor,
    _aten.div.Tensor,
}
"""Calls that take samples of every operand that has the batch, and broadcast the others.

Only exactly rounded ones: `exp` and the like have other bits in a vector than in what is left at the end of a slice.
"""


def batch_of(call: fx.Node | Call) -> int:
    """How many samples the results have; 0 if the op does not treat samples one by one."""
    results = call.meta.get("val")
    found = [r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, torch.Tensor)]
    if not found or not all(_samples_outside(r) and r.shape[0] == found[0].shape[0] for r in found):
        return 0
    return int(found[0].shape[0]) if sliced_operands(call) else 0


def sliced_operands(call: fx.Node | Call) -> frozenset[fx.Node]:
    """The operands of which the op takes samples; none if it cannot run so."""
    nodes = _nodes(call.args)
    if call.kwargs and call.target in _ELEMENT_BY_ELEMENT:
        return frozenset()  # `alpha` multiplies as well, rounded once or twice
    if call.target in _OF_FIRST:
        sliced, whole = nodes[:1], nodes[1:]
    elif call.target is _aten.cat.default and _dimension(call) != 0:
        sliced, whole = nodes, []
    elif call.target in _ELEMENT_BY_ELEMENT:
        shape = call.meta["val"].shape
        if len(shape) < 2:
            return frozenset()
        sliced = [n for n in nodes if _has_batch(n, shape)]
        whole = [n for n in nodes if not _has_batch(n, shape)]
        if any(n.meta["val"].dim() == len(shape) and n.meta["val"].shape[0] != 1 for n in whole):
            return frozenset()
    else:
        return frozenset()
    if set(sliced) & set(whole) or not all(_samples_outside(n.meta.get("val")) for n in sliced):
        return frozenset()
    return frozenset(sliced)


def owns_memory(node: fx.Node) -> bool:
    """Whether a result lies in memory that holds nothing else, so that another one fits there when it is gone."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and _is_alone(value)


def samples_per_slice(calls: Iterable[fx.Node | Call]) -> dict[int, int]:
    """For each size of batch how many samples a slice has, the same for all ops so that they can run together."""
    largest: dict[int, int] = {}
    for call in calls:
        batch = batch_of(call)
        results = call.meta["val"] if isinstance(call.meta["val"], list | tuple) else [call.meta["val"]]
        nbytes = sum(r.numel() * r.element_size() for r in results if isinstance(r, torch.Tensor))
        largest[batch] = max(largest.get(batch, 1), nbytes)
    # Of at least two slices, since one is the whole.
    return {
        batch: min(max(1, _SLICE_BYTES * batch // nbytes), -(-batch // 2))
        for batch, nbytes in largest.items()
        if batch > 1
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """How ops that run as one are called.

    Attributes:
        run: of one slice: from operands to the slices of the results.
        sliced: positions of operands of which samples are taken.
        batch: samples in all.
        samples: in one slice.
        results: a tensor like each result.
        over: for each result the position of the operand whose memory it takes over, if any; one that is not sliced
            serves for nothing else.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    sliced: Collection[int]
    batch: int
    samples: int
    results: Sequence[torch.Tensor]
    over: Sequence[int | None]


def in_slices(how: Slice) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What runs ops as one, slice after slice."""
    layouts = [(tuple(r.shape), r.stride(), r.dtype) for r in how.results]

    def fused(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=operands[0].device)
            if over is None
            # Sample for sample in the same place, whatever the shapes.
            else operands[over].new_empty(0, dtype=dtype).set_(operands[over].untyped_storage(), 0, shape, stride)
            for (shape, stride, dtype), over in zip(layouts, how.over, strict=True)
        ]
        for start in range(0, how.batch, how.samples):
            here = slice(start, start + how.samples)
            parts = how.run(*(t[here] if i in how.sliced else t for i, t in enumerate(operands)))
            for place, result in enumerate(results):
                result[here] = parts[place]
            del parts  # else the next slice is made beside them
        return tuple(results)

    return fused


def _has_batch(node: fx.Node, shape: Sequence[int]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == len(shape) and value.shape[0] == shape[0]


def _samples_outside(value: object) -> bool:
    """Whether samples lie one after the other, each dense, in memory that holds nothing else."""
    return bool(
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dim() > 1
        and value.shape[0] > 1
        and _is_alone(value)
        and value.stride(0) * value.shape[0] == value.numel()
    )


def _is_alone(tensor: torch.Tensor) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes)


def _nodes(arguments: Any) -> list[fx.Node]:
    """The operands in order, those in lists too."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found


def _dimension(call: fx.Node | Call) -> int:
    dimension = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    assert isinstance(dimension, int)
    return int(dimension % call.meta["val"].dim())
