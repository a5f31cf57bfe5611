"""Matrix products: of rows with a matrix, of batches of matrices, and sums of products over rows."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import first_result, rows
from memfit.ops.kernels.row_products import add_product_over_rows, product_over_rows
from memfit.ops.op_rule import Accumulation, Axes, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten


def _biased_product(call: fx.Node | Call, batch: int) -> Axes | None:
    """The rule of a batch of products added to an operand that may be the same for all products."""
    added, *factors = (cast(fx.Node, a) for a in call.args[:3])
    value, result = added.meta["val"], first_result(call)
    if added in factors or factors[0] is factors[1]:
        return None
    operands = dict.fromkeys(factors, 0)
    if value.dim() == result.dim() and value.shape[0] == result.shape[0]:
        operands[added] = 0
    return Axes(operands, 0)


def _adds_one_row(call: fx.Node | Call) -> bool:
    bias = cast(fx.Node, call.args[0]).meta["val"]
    return bool(bias.dim() < 2 or bias.shape[0] == 1)


def _added_product(call: fx.Node | Call, batch: int) -> Axes | None:
    found = rows(0, 1)(call, batch)
    return None if found is None else replace(found, run=add_product_over_rows)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: int = 1) -> None:
    total.addmm_(left, right, beta=beta)


RULES = {
    _aten.mm.default: OpRule(
        batch=rows(0),
        reads_matrix=True,
        accumulation=Accumulation(_add_product, lambda call: not call.kwargs),
        binding=torch.mm,
    ),
    _aten.addmm.default: OpRule(batch=rows(1, when=_adds_one_row), reads_matrix=True, binding=torch.addmm),
    _aten.bmm.default: OpRule(batch=rows(0, 1), binding=torch.bmm),
    _aten.baddbmm.default: OpRule(batch=_biased_product),
    product_over_rows: OpRule(batch=_added_product, sums=frozenset({0}), reads_matrix=True),
}
