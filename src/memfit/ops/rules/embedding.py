"""Look-up of rows, and its gradient, which is zero except for the rows that were looked up.

Known limits: a gradient is added to `.grad` directly on CPU only, because on CUDA the sum would depend on the order in
which threads arrive; and without `padding_idx` and `scale_grad_by_freq`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.fxir.layout import outer_axis
from memfit.ops.batching.axes import first_result
from memfit.ops.op_rule import Accumulation, Axes, Fill, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten


def _embedding(call: fx.Node | Call, batch: int) -> Axes | None:
    axis, places = outer_axis(first_result(call), batch), cast(fx.Node, call.args[1])
    return None if axis is None or axis >= places.meta["val"].dim() else Axes({places: axis}, axis)


def _add_rows(total: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, *_: Any, beta: int = 1) -> None:
    if beta == 0:
        total.zero_()
    total.index_add_(0, indices.flatten(), gradient.reshape(indices.numel(), -1))


def _can_add(call: fx.Node) -> bool:
    padding, by_frequency = call.args[3:5]
    return bool(call.meta["val"].device.type == "cpu" and padding == -1 and not by_frequency)


RULES = {
    _aten.embedding.default: OpRule(
        batch=_embedding,
        binding=torch.embedding,
        fill=Fill(operand=1, fill=lambda indices, args: indices.random_(0, max(1, int(args[0].shape[0])))),
    ),
    _aten.embedding_dense_backward.default: OpRule(
        accumulation=Accumulation(_add_rows, _can_add),
        fill=Fill(operand=1, fill=lambda indices, args: indices.random_(0, max(1, int(args[2])))),
    ),
}
