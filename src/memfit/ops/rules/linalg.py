"""Linear algebra on factors that a decomposition has made: pivots are positions and start at one."""

from __future__ import annotations

import torch

from memfit.ops.op_rule import Fill, OpRule

__all__ = ["RULES"]

_aten = torch.ops.aten

_ONES = Fill(operand=1, fill=lambda pivots, args: pivots.fill_(1))

RULES = {
    op: OpRule(fill=_ONES)
    for op in (_aten.linalg_lu_solve.default, _aten.linalg_ldl_solve.default, _aten.lu_unpack.default)
}
