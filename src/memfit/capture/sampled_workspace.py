"""Workspace of convolutions that nobody profiled, from a few samples of the batch.

CPU's convolutions copy operands into blocked layouts, or, where oneDNN has no kernel (float64, some shapes), into
columns: workspace as large as the operands, or many times that. No formula tells which kernel is taken, so the call is
made on two samples and on four, and what it takes grows with the samples: a line through two points. Calls of no more
than four samples run whole.

Known limits: CPU only, and batches that are outermost in memory; a kernel that is another for a large batch is not
seen; calls that would take too long or too much memory even so have none.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from memfit.capture.again import Call
from memfit.capture.cost_key import cost_key
from memfit.capture.one_run import measured
from memfit.capture.rewrite import convolution_input_gradient
from memfit.capture.roofline import flops_of

__all__ = ["SampledWorkspace"]

log = logging.getLogger(__name__)

_aten = torch.ops.aten

_SAMPLED: dict[Any, tuple[int, ...]] = {
    _aten.convolution.default: (0,),
    _aten.convolution_backward.default: (0, 1),
    convolution_input_gradient: (0, 1),
}
"""Of each call the operands that have a row for each sample."""

_FEW, _MORE = 2, 4
_MOST_FLOPS = 2e11
_MOST_BYTES = 1 << 30


class SampledWorkspace:
    """Workspaces of the calls of one step, each distinct call asked once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, call: fx.Node | Call) -> int:
        """Bytes that the call takes beyond what it reads and writes; 0 if it is none of those that are asked."""
        if call.target not in _SAMPLED:
            return 0
        key = cost_key(call)
        if key not in self._known:
            self._known[key] = _workspace_bytes(call)
        return self._known[key]


def _workspace_bytes(call: fx.Node | Call) -> int:
    values: Any = fx.map_arg(tuple(call.args), lambda node: node.meta.get("val"))
    rows = [values[index] for index in _SAMPLED[call.target]]
    if any(not isinstance(t, torch.Tensor) or t.device.type != "cpu" or not _batch_is_outermost(t) for t in rows):
        return 0
    batch = int(rows[0].shape[0])
    counts = (batch,) if batch <= _MORE else (_FEW, _MORE)
    share = counts[-1] / max(1, batch)
    nbytes = share * sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))
    if not batch or share * flops_of(call) > _MOST_FLOPS or nbytes > _MOST_BYTES:
        return 0
    try:
        taken = [_taken_bytes(call.target, values, _SAMPLED[call.target], count) for count in counts]
    except (RuntimeError, TypeError, ValueError) as error:
        log.info("cannot ask a sample of %s for its workspace (%s)", call.target, error)
        return 0
    if len(taken) == 1:
        return taken[0]
    few, more = taken
    return max(0, few + (more - few) * (batch - _FEW) // (_MORE - _FEW))


def _taken_bytes(target: Any, values: tuple[Any, ...], rows: tuple[int, ...], count: int) -> int:
    def sample(index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = (count, *value.shape[1:]) if index in rows else value.shape
        return torch.empty_strided(tuple(shape), value.stride(), dtype=value.dtype, device="cpu").zero_()

    args = [sample(index, value) for index, value in enumerate(values)]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        _, way = measured(lambda: target(*args), torch.device("cpu"))
    return way.workspace_bytes


def _batch_is_outermost(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 2 and tensor.stride(0) >= max(tensor.stride()[1:])
