"""Fused attention: on a batch, each sample attends within itself.

Known limits: samples only for the CPU kernel; the others run whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import first_result, operands_at
from memfit.ops.op_rule import Axes, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten


def _attention(*positions: int) -> Callable[[fx.Node | Call, int], Axes | None]:
    """The rule of attention with samples in the operands at `positions`, and in a mask that has one for each sample."""

    def rule(call: fx.Node | Call, batch: int) -> Axes | None:
        sliced, mask = operands_at(call, positions), call.kwargs.get("attn_mask")
        if sliced is None:
            return None
        operands = dict.fromkeys(sliced, 0)
        samples = first_result(call).shape[0]
        if isinstance(mask, fx.Node) and mask.meta["val"].dim() == 4 and mask.meta["val"].shape[0] == samples:
            operands[mask] = 0
        return Axes(operands, 0)

    return rule


RULES = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: OpRule(batch=_attention(0, 1, 2)),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: OpRule(batch=_attention(0, 1, 2, 3, 4, 5)),
    _aten._scaled_dot_product_efficient_attention_backward.default: OpRule(seeds_on_host=True),
    _aten._efficient_attention_backward.default: OpRule(seeds_on_host=True),
}
