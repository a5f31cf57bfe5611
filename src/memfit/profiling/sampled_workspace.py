"""Workspace of kernels that were not profiled, from a few samples of the batch.

Kernels take memory that no op returns. CPU convolutions copy operands into blocked layouts, or, where oneDNN has no
kernel (float64, some shapes), into columns; poolings copy operands in other layouts; a transform, a sort and the
gradient of a normalisation have buffers of their own. No formula tells which kernel is taken, so a small call runs as
it is, and a large call runs with two samples of the batch and with four: its workspace grows with the samples, a line
through two points. A fused recurrent layer always runs as it is.

Known limits: CPU only; torch's own ops only; large calls only if the batch is outermost in memory. A kernel that is
chosen only for a large batch is not seen. Calls that would take too long or too much memory even with few samples count
as without workspace. Where a call runs with all indices alike, a kernel that sorts them may take less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from memfit.capture.eager.fake_strides import TAKING_INDICES, reads_by_index
from memfit.capture.eager.kernel_samples import kernels_only
from memfit.fxir.call import Call
from memfit.fxir.signature import cost_key
from memfit.ops.kernels.convolution import convolution_input_gradient
from memfit.profiling.memory import allocation_peak
from memfit.profiling.roofline import flops_of, flops_of_values
from memfit.torch_compat.core import OpOverload, pytree

__all__ = ["SampledWorkspace", "is_convolution"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten

_SAMPLED: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0,),
    _aten.convolution_backward.default: (0, 1),
    convolution_input_gradient: (0, 1),
}
"""The operands of convolutions that have a row per sample; for other ops, operands as long as the first operand."""

_TAKING_INDICES = {
    getattr(_aten, name)
    for name in (
        *("embedding", "embedding_dense_backward", "index", "max_pool2d_with_indices_backward"),
        *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
        "mkldnn_rnn_layer_backward",
        *("sort", "topk", "sum", "cumsum", "cat", "repeat", "where", "_to_copy", "clone", "copy_"),
    )
}
"""More ops that can run with zeros for integers: indices along an axis, classes, or plain numbers."""

_FUSED_LAYERS = (_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default)
"""Ops that run as they are, however large: the reserve of a layer belongs to all its samples."""

_KNOWN = ("aten", "memfit")
_FEW, _MORE = 2, 4
_MOST_FLOPS = 2e11
_MOST_BYTES = 1 << 30
_WHOLE_BYTES = 1 << 24
"""A call that reads and writes no more bytes runs as it is."""


def is_convolution(call: fx.Node | Call) -> bool:
    """Whether a call is a convolution, or a part of its backward pass."""
    return call.target in _SAMPLED


class SampledWorkspace:
    """Workspaces of the calls of one step; each distinct call is measured once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, call: fx.Node | Call) -> int:
        """Bytes that a convolution of a graph takes beyond its operands and results; 0 for another call."""
        if call.target not in _SAMPLED:
            return 0
        values: Any = fx.map_arg(tuple(call.args), lambda node: node.meta.get("val"))
        return self._asked(cost_key(call), call.target, values, {}, flops_of(call), call.meta.get("val"))

    def of_values(self, target: object, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        """Workspace bytes of an op of torch's or memfit's own, called with fake tensors."""
        if not isinstance(target, OpOverload) or target.namespace not in _KNOWN or target.is_view:
            return 0
        key = f"{target}({','.join(_described(v) for v in (*args, *kwargs.items()))})"
        return self._asked(key, target, tuple(args), kwargs, flops_of_values(target, args, kwargs, result), result)

    def reserve_of(self, target: object, args: Sequence[Any]) -> int:
        """Bytes of the reserve that a fused CPU layer saves for its backward pass; as a fake tensor it is empty."""
        if target is not _aten.mkldnn_rnn_layer.default:
            return 0
        key = f"reserve of {','.join(_described(value) for value in args)}"
        if key not in self._known:
            with kernels_only(random=True), torch.autocast("cpu", enabled=False):
                *_, reserve = _aten.mkldnn_rnn_layer.default(*(_sample(value, frozenset(), 0) for value in args))
            self._known[key] = int(reserve.untyped_storage().nbytes())
        return self._known[key]

    def _asked(
        self, key: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], flops: float, result: Any
    ) -> int:
        if key not in self._known:
            self._known[key] = _workspace_bytes(target, args, kwargs, flops, result)
        return self._known[key]


def _workspace_bytes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], flops: float, result: Any) -> int:
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    if not tensors or any(t.device.type != "cpu" or t.layout is not torch.strided for t in tensors):
        return 0
    if isinstance(target, OpOverload) and reads_by_index(target, tensors):
        if target.overloadpacket not in TAKING_INDICES | _TAKING_INDICES:
            return 0
    rows = _SAMPLED.get(target)
    operands = tensors if rows is None else [args[index] for index in rows]
    batch = int(operands[0].shape[0]) if operands[0].dim() else 0
    sampled = {id(t) for t in operands if rows is not None or (t.dim() and t.shape[0] == batch)}
    made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]  # products may be far larger
    nbytes = sum(t.numel() * t.element_size() for t in (*tensors, *made))
    whole = batch <= _MORE or nbytes <= _WHOLE_BYTES or target in _FUSED_LAYERS
    counts = (batch,) if whole else (_FEW, _MORE)
    if counts != (batch,) and not all(_batch_is_outermost(t) for t in tensors if id(t) in sampled):
        return 0
    share = counts[-1] / max(1, batch)
    if share * flops > _MOST_FLOPS or share * nbytes > _MOST_BYTES:
        return 0
    try:
        taken = [_taken_bytes(target, args, kwargs, sampled, count) for count in counts]
    except Exception as error:  # a kernel that does not take such a call may raise anything
        log.info("cannot ask a sample of %s for its workspace (%s)", target, error)
        return 0
    if len(taken) == 1:
        return taken[0]
    few, more = taken
    return max(0, few + (more - few) * (batch - _FEW) // (_MORE - _FEW))


def _taken_bytes(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], sampled: Set[int], count: int) -> int:
    results: list[Any] = []
    with kernels_only(random=True), torch.autocast("cpu", enabled=False):
        ours, named = pytree.tree_map(lambda value: _sample(value, sampled, count), (args, dict(kwargs)))
        operands = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((ours, named)) if _is_strided(t)}
        peak = allocation_peak(lambda: results.append(target(*ours, **named)))
    storages = [t.untyped_storage() for t in pytree.tree_leaves(results) if _is_strided(t)]
    made = {storage.data_ptr(): int(storage.nbytes()) for storage in storages}
    return max(0, peak - sum(made[pointer] for pointer in made.keys() - operands))


def _sample(value: Any, sampled: Set[int], count: int) -> Any:
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, torch.Tensor):
        return value
    shape = (count, *value.shape[1:]) if id(value) in sampled else tuple(value.shape)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, value.stride(), strict=True) if size)
    number = 0.5 if value.dtype.is_floating_point else 0
    return torch.full((extent,), number, dtype=value.dtype, device="cpu").as_strided(shape, value.stride())


def _is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride()) if _is_strided(value) else value.layout}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(_described(v) for v in value) + ")"
    return repr(value)


def _batch_is_outermost(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.stride(0) >= max(tensor.stride()[1:])
