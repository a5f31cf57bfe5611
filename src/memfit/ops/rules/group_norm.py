"""Group normalisation, of each sample by itself, and the kernels into which memfit splits it for tiles."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.ops.batching.axes import first_result, operands_at, rows
from memfit.ops.kernels.group_norm import (
    input_gradient,
    products_over_space,
    scaled_and_shifted,
    sums_of_space,
)
from memfit.ops.op_rule import Axes, OpRule
from memfit.ops.tiling.same_tile import same_tile_beside_numbers

__all__ = ["RULES"]

_aten = torch.ops.aten


def _group_norm(call: fx.Node | Call, batch: int) -> Axes | None:
    is_backward = call.target is _aten.native_group_norm_backward.default
    sliced = operands_at(call, (0, 1, 2, 3) if is_backward else (0,))
    place, target = 5 if is_backward else 3, cast(Any, call.target)
    result = first_result(call)
    if sliced is None or not isinstance(result, torch.Tensor) or call.args[place] != result.shape[0]:
        return None

    def run(data: torch.Tensor, *rest: Any) -> Any:
        return target(data, *rest[: place - 1], data.shape[0], *rest[place:])

    return Axes(dict.fromkeys(sliced, 0), 0, run)


RULES = {
    _aten.native_group_norm.default: OpRule(batch=_group_norm, binding=torch.native_group_norm),
    _aten.native_group_norm_backward.default: OpRule(batch=_group_norm, sums=frozenset({1, 2})),
    sums_of_space: OpRule(
        batch=rows(0, 1),
        tile=same_tile_beside_numbers(1),
        sums=frozenset({0}),
    ),
    scaled_and_shifted: OpRule(batch=rows(0, 1, 2), tile=same_tile_beside_numbers(1)),
    products_over_space: OpRule(
        batch=rows(0, 1, 2),
        tile=same_tile_beside_numbers(2),
        sums=frozenset({0}),
    ),
    input_gradient: OpRule(batch=rows(0, 1, 2, 3, 4), tile=same_tile_beside_numbers(2)),
}
