"""How a call runs on a few samples of the batch at a time.

Known limits: attention only as the fused kernel on CPU, or written out as matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import outer_axis, results_of
from memfit.ops.kernels.library import direct
from memfit.ops.registry import rule_of, sums_of

__all__ = ["Sampling", "sampling_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a call runs on samples.

    Attributes:
        operands: operands of which the call takes samples, with the axis of each.
        axes: axis of samples of each result; None for sums over the batch and for results that are not tensors.
        run: function that is called in place of the call's target.
    """

    operands: Mapping[fx.Node, int]
    axes: tuple[int | None, ...]
    run: Callable[..., Any]


def sampling_of(call: fx.Node | Call, batch: int) -> Sampling | None:
    """How a call runs on samples of a batch; None if it cannot."""
    rule = rule_of(call.target).batch
    found = rule(call, batch) if rule is not None and batch > 1 else None
    if found is None or not found.operands:
        return None
    sums, results = sums_of(call), results_of(call)
    axes = tuple(
        found.of_results if isinstance(result, torch.Tensor) and place not in sums else None
        for place, result in enumerate(results)
    )
    outside = all(axis is None or outer_axis(result, batch) == axis for axis, result in zip(axes, results, strict=True))
    divides = all(
        axis < node.meta["val"].dim() and node.meta["val"].shape[axis] % batch == 0
        for node, axis in found.operands.items()
    )
    return (
        Sampling(operands=found.operands, axes=axes, run=found.run or direct(call.target))
        if outside and divides
        else None
    )
