"""Counts the ops that run, as evidence that the recomputations of a plan really happen.

Known limits: an in-place call counts as its out-of-place op, all forward batch normalisations as one op; an op that
autograd itself adds between two graphs (a sum of gradients) counts too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from memfit.fxir.op_family import op_family
from memfit.ir.graph import StepGraph
from memfit.ir.program import Action, Program, as_they_run
from memfit.torch_compat.core import OpOverload, TorchDispatchMode

__all__ = ["ExecutedOps", "executed_recomputations"]


class ExecutedOps(TorchDispatchMode):
    """Dispatch mode that counts calls by `op_family` while it is active."""

    # Without these attributes, Dynamo would refuse to run compiled code under the mode, and replayed random ops
    # (higher-order operators) could not be counted; the mode only watches.
    is_infra_mode = classmethod(lambda cls: True)
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = next((a for a in args if isinstance(a, OpOverload)), func)
        self.counts[op_family(str(inner))] += 1
        return func(*args, **(kwargs or {}))


_CALLS = {
    "normalise": ("addcmul", "addcmul"),
    "gradients_from_products": (
        *("mul", "sub", "mul", "mul", "sum", "mul", "sub", "pow", "mul", "mul", "neg", "mul", "mul", "mul", "sub"),
        *("to_copy",) * 4,
    ),
    "input_gradient": ("addcmul", "addcmul"),
    "input_gradient_from_sums": ("sub", "mul", "div", "div", "addcmul", "sub", "mul", "mul"),
    "masked": ("mul", "mul"),
    "product_over_rows": ("mm",),
    "products_over_space": ("mul", "sum", "sum", "stack", "new_zeros", "index_add"),
    "scale_and_shift": (
        *("sum", "div", "mul", "sub", "clamp", "add", "rsqrt", "mul", "mul", "sub"),
        *("to_copy", "to_copy", "stack"),
    ),
    "scaled_and_shifted": ("addcmul",),
    "share_of_mean": ("eq", "div", "where"),
    "sums_of_data": ("mul", "mul", "add", "mul"),
    "sums_of_space": ("var_mean", "to_copy", "to_copy", "mul", "mul", "add", "mul", "stack", "new_zeros", "index_add"),
    "statistics_from_sums": ("div", "mul", "sub", "add", "mul", "mul", "add", "mul", "mul", "add"),
}
"""Families of the ops that memfit's own targets call (`memfit.fxir.call` and `memfit.ops.kernels.batch_norm`)."""


_IN_TILES = {
    "aten.max_pool2d_with_indices.default": {1: ("add",), 2: ("div", "mul", "sub", "add", "add", "mul", "add")},
    "aten.max_pool2d_with_indices_backward.default": {
        1: ("sub",),
        2: ("div", "mul", "sub", "sub", "mul", "sub", "add"),
    },
}
"""Families of the additional calls for each tile, by op and number of cut axes (`memfit.ops.tiling.rules`)."""

_AT_BORDERS = {"constant_pad_nd", "clamp", "new_zeros", "copy"}
"""Families of additional calls that only some tiles make, which cannot be told from recomputed ops."""


def executed_recomputations(counts: Counter[str], graph: StepGraph, program: Program) -> int:
    """The number of ops that were recomputed.

    Args:
        counts: of forward and backward pass, the loss not included.
        graph: the step.
        program: the program that should have run.

    Returns:
        `len(program.recomputed())` if exactly the ops of the program ran, else that plus the difference of calls.
    """
    again = program.recomputed()
    families = {family for i in again for family in _calls(graph.ops[i].later.target)}
    if any(op.by_slices is not None and op.by_slices.grid for op in graph.ops):
        families -= _AT_BORDERS
    computes = [i for i in program.instructions if i.action is Action.COMPUTE]
    if any(i.sliced for i in computes):
        families -= {"copy"}  # puts slices together
    expected: Counter[str] = Counter()
    for instruction, op in zip(computes, as_they_run(graph, program.order()), strict=True):
        adds_up = instruction.sliced and op.by_slices is not None and op.by_slices.accumulates
        for family in ("addmm",) if adds_up else _calls(op.target):
            expected[family] += instruction.chunks
        if instruction.sliced and op.by_slices is not None:  # sums over slices
            expected["add"] += 0 if adds_up else len(op.by_slices.sums) * (instruction.chunks - 1)
            for family in _IN_TILES.get(op.target, {}).get(len(op.by_slices.grid), ()):
                expected[family] += instruction.chunks
    return len(again) + sum(counts[f] - expected[f] for f in families)


def _calls(target: str) -> tuple[str, ...]:
    return _CALLS.get(target, (op_family(target),))
