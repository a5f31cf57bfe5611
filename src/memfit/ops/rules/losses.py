"""Losses: a sum over the batch is a sum over its slices; a mean divides by a number of the whole batch."""

from __future__ import annotations

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import rows
from memfit.ops.kernels.row_products import SUM
from memfit.ops.op_rule import Fill, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten


def _is_sum(call: fx.Node | Call) -> bool:
    return bool(call.args[3] == SUM)


def _is_reduced(call: fx.Node | Call) -> bool:
    return bool(call.args[4] != 0)  # otherwise the gradient operand has one number per row


RULES = {
    _aten.nll_loss_forward.default: OpRule(batch=rows(0, 1, when=_is_sum), sums=frozenset({0, 1})),
    _aten.nll_loss_backward.default: OpRule(batch=rows(1, 2, when=_is_reduced)),
    _aten.multilabel_margin_loss_backward.default: OpRule(fill=Fill(operand=4, fill=lambda marks, args: marks.zero_())),
    # They draw no random numbers but accept only numbers between zero and one.
    _aten.binary_cross_entropy.default: OpRule(takes_shares=True),
    _aten.binary_cross_entropy_backward.default: OpRule(takes_shares=True),
}
