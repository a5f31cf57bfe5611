"""Batch normalisation on CUDA with the kernels that eager PyTorch picks.

Eager batch normalisation picks cuDNN for most inputs; AOTAutograd writes PyTorch's own kernel into the graph, whose
bits differ. So where eager mode would pick cuDNN, the graph gets cuDNN's kernels back, forward and backward. The
forward kernel passes a *reserve* to the backward kernel, so the graph has the reserve as one more result.

Source of the choice: `torch.nn.functional.batch_norm` in C++, whose choice can be queried.

Known limits: nothing is done for MIOpen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.marks import original
from memfit.ops.kernels.batch_norm import cudnn_batch_norm, cudnn_batch_norm_backward, cudnn_batch_norm_updating
from memfit.passes.replace_uses import replace_uses
from memfit.torch_compat.core import cudnn_batch_norm_reserve_bytes, cudnn_takes_batch_norm, detect_fake_mode

__all__ = ["take_cudnn_batch_norm"]

_aten = torch.ops.aten

_RESERVE = 5
"""The reserve's place among the results of `cudnn_batch_norm`."""


def take_cudnn_batch_norm(module: fx.GraphModule) -> None:
    """Replaces the batch normalisations of a joint graph for which eager PyTorch picks cuDNN."""
    graph = module.graph
    for target, arguments in _FORWARD.items():
        for node in graph.find_nodes(op="call_function", target=target):
            args = arguments(*node.args)
            if _takes_cudnn(args):
                _replace(node, cudnn_batch_norm, args, (*node.meta["val"], None, None)[:_RESERVE], _reserve(args))
    for node in graph.find_nodes(op="call_function", target=_aten.native_batch_norm_backward.default):
        gradient, data, weight, _, _, mean, invstd, training, eps, _ = cast(tuple[Any, ...], node.args)
        forward = original(mean).args[0] if training else None
        if isinstance(forward, fx.Node) and forward.target is cudnn_batch_norm:
            reserve = _reserve_of(forward)
            _replace(node, cudnn_batch_norm_backward, (gradient, data, weight, mean, invstd, eps, reserve))
    for node in graph.find_nodes(op="call_function", target=cudnn_batch_norm):
        # Then the kernel updates the buffers itself, and AOTAutograd has nothing to copy into them after the pass.
        if node.args[5] and all(isinstance(a, fx.Node) and _is_read_here_only(a) for a in node.args[3:5]):
            node.target = cudnn_batch_norm_updating


_FORWARD: dict[Any, Callable[..., tuple[Any, ...]]] = {
    _aten._native_batch_norm_legit_functional.default: lambda *args: args,
    _aten._native_batch_norm_legit.no_stats: lambda data, weight, bias, *rest: (data, weight, bias, None, None, *rest),
    _aten._native_batch_norm_legit_no_training.default: lambda *args: (*args[:5], False, *args[5:]),
}
"""Ops of batch normalisation in a graph; each has a function that turns its arguments into `cudnn_batch_norm`'s."""


def _takes_cudnn(args: tuple[Any, ...]) -> bool:
    data, weight, bias, *rest = (a.meta["val"] if isinstance(a, fx.Node) else a for a in args)
    if data.device.type != "cuda" or weight is None or bias is None:
        return False
    running_mean, running_var, training, _, eps = rest
    if running_mean is None or running_var is None:
        if not training:
            return False
        running_mean, running_var = weight, bias  # Python's binding takes tensors only, C++ also accepts none
    return cudnn_takes_batch_norm(data, weight, bias, running_mean, running_var, training, eps)


def _is_read_here_only(buffer: fx.Node) -> bool:
    return buffer.op == "placeholder" and len(buffer.users) == 1


def _reserve(args: tuple[Any, ...]) -> torch.Tensor:
    """A fake tensor of the reserve's size."""
    data = args[0].meta["val"]
    nbytes = cudnn_batch_norm_reserve_bytes(data, args[5])
    with detect_fake_mode(data) or nullcontext():
        return torch.empty(nbytes, dtype=torch.uint8, device=data.device)


def _reserve_of(forward: fx.Node) -> fx.Node:
    """The node that takes the reserve; created if there is none."""
    for user in forward.users:
        if user.args[1] == _RESERVE:
            return user
    with forward.graph.inserting_after(forward):
        taken = forward.graph.call_function(operator.getitem, (forward, _RESERVE))
    taken.meta = {**forward.meta, "val": forward.meta["val"][_RESERVE]}
    return taken


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...], *values: Any) -> None:
    """Replaces a node by a call with the same results, or with `values`: the first results, then one more."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta = dict(node.meta)
    if values:
        made.meta["val"] = (*values[0], values[1])
    replace_uses(node, made)
    node.graph.erase_node(node)
