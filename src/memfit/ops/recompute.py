"""Recomputation of an op by another call that runs in its place.

Batch normalisation in training mode computes statistics, updates the running statistics and normalises. Its
recomputation must not update the running statistics a second time, and its result does not depend on them. The batch
statistics are a few numbers per channel, so those of the first run are saved (the backward pass needs them anyway) and
the recomputation only normalises: one pass over the data instead of three, sample by sample, in place over its input
where the input dies.

The profiler compares the bits for each shape; where they differ, the whole kernel is recomputed without running
statistics.

Known limits: normalisation from saved statistics is for float32 on CPU, where the kernel multiplies and adds with one
rounding, as `addcmul` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.kernels.batch_norm import normalise
from memfit.ops.registry import rule_of
from memfit.torch_compat.core import detect_fake_mode

__all__ = ["from_statistics", "lies_as", "new_statistics_are_read", "without_statistics"]

_aten = torch.ops.aten

_RUNNING_STATISTICS = (3, 4)
"""Positions of the new running mean and variance among the results of a batch normalisation."""


def without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The call that recomputes a batch normalisation: same results, no running statistics.

    In training mode the result does not depend on the running statistics, and a second update would be wrong.

    Returns:
        Target and arguments, or None if the node is not a batch normalisation in training mode.
    """
    rerun = rule_of(node.target).recompute_as
    if rerun is None or node.args[5] is not True:
        return None
    data, weight, bias, _, _, *rest = node.args
    return rerun, (data, weight, bias, None, None, *rest)


def new_statistics_are_read(node: fx.Node) -> bool:
    """Whether a graph computes with the new running statistics of a batch normalisation, which no recomputation makes.

    Instance normalisation with running statistics averages those of all samples.
    """
    if without_statistics(node) is None:
        return False
    new = [user for user in node.users if user.target is operator.getitem and user.args[1] in _RUNNING_STATISTICS]
    return any(_computes_with(user) for one in new for user in one.users)


def _computes_with(user: fx.Node) -> bool:
    """Whether a user of a running statistic depends on it; the backward pass in training mode does not."""
    if user.op == "output" or user.target is _aten.copy_.default:
        return False
    return "batch_norm_backward" not in str(user.target)


def from_statistics(node: fx.Node) -> Call | None:
    """The call that recomputes the first result of a batch normalisation, given its statistics.

    Returns:
        The call, or None if there is no such call for the node.
    """
    if node.target is not _aten._native_batch_norm_legit_functional.default or node.args[5] is not True:
        return None
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if not {0, 1, 2} <= results.keys():
        return None
    data, weight, bias = node.args[:3]
    value = cast(fx.Node, data).meta["val"]
    if value.device.type != "cpu" or value.dtype is not torch.float32:
        return None
    args = (data, results[1], results[2], weight, bias)
    if not lies_as(normalise, args, results[0].meta["val"]):
        return None
    return Call(name=node.name, target=normalise, args=args, meta={"val": results[0].meta["val"]})


def lies_as(target: Callable[..., torch.Tensor], args: tuple[Any, ...], like: torch.Tensor) -> bool:
    """Whether the call's result has the strides of `like`. Otherwise the views of `like` cannot be taken of the result.

    A batch normalisation kernel makes a contiguous result from data that is neither contiguous nor channels last;
    pointwise ops keep the strides of the data.

    Args:
        target: function that makes one tensor.
        args: arguments of the call, nodes or fake tensors.
        like: result of the kernel, a fake tensor.
    """
    values = fx.map_arg(args, lambda node: node.meta["val"])
    with detect_fake_mode(like) or nullcontext():
        return target(*values).stride() == like.stride()
