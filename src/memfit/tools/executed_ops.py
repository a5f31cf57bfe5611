"""Counts the ops that run, as evidence that the recomputations of a plan really happen.

Known limits: an in-place call counts as its out-of-place op, all forward batch normalisations as one op; an op that
autograd itself adds between two graphs (a sum of gradients) counts too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from memfit.fxir.op_family import op_family
from memfit.ir.graph import StepGraph
from memfit.ir.instructions import computes_in
from memfit.ir.program import Program, as_they_run
from memfit.ops.registry import rule_named
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
    families = {op_family(graph.ops[i].later.target) for i in again}
    if any(op.by_slices is not None and op.by_slices.grid for op in graph.ops):
        families -= _AT_BORDERS
    computes = computes_in(program.instructions)
    if any(i.sliced for i in computes):
        families -= {"copy"}  # puts slices together
    expected: Counter[str] = Counter()
    for instruction, op in zip(computes, as_they_run(graph, program.order()), strict=True):
        adds_up = instruction.sliced and op.by_slices is not None and op.by_slices.accumulates
        expected["addmm" if adds_up else op_family(op.target)] += instruction.chunks
        if instruction.sliced and op.by_slices is not None:  # sums over slices
            expected["add"] += 0 if adds_up else len(op.by_slices.sums) * (instruction.chunks - 1)
            for family in rule_named(op.target).tile_calls.get(len(op.by_slices.grid), ()):
                expected[family] += instruction.chunks
    return len(again) + sum(counts[f] - expected[f] for f in families)
