"""Lower bounds of time and of memory, which no plan can beat.

The relaxed bound on time is the larger of two relaxations. One limits memory at the loss only
(`memfit.planner.bounds.relaxation`), the other at several instants (`memfit.planner.bounds.relaxation_over_time`). Only
the first one models swaps and backward ops that run slice by slice, so it is used alone where the step has tiers or is
tiled.

The least peak is bounded by the widest op: its operands, results and workspace, static bytes and the
gradients produced before it.
"""

from __future__ import annotations

from memfit.ir.graph import Op, StepGraph
from memfit.planner.bounds.relaxation import select_saved
from memfit.planner.bounds.relaxation_over_time import least_seconds_over_time
from memfit.planner.effort import Effort

__all__ = ["LARGE_STEP", "widest_op_bytes", "relaxed_bound"]

LARGE_STEP = 1000
"""A step of more ops is large: the planners then spend less time where they can."""


def relaxed_bound(graph: StepGraph, budget_bytes: int, *, seconds: float = 5.0, effort: Effort | None = None) -> float:
    """Least extra seconds any program takes within a budget; infinite if none fits.

    Args:
        graph: the step, with times.
        budget_bytes: peak of the step.
        seconds: limit of each of three solves in nominal seconds; the last one, which takes most of the time and adds
            least, is left out for a large step.
        effort: counts the work.

    Returns:
        The bound, which is also valid when a limit is reached.
    """
    held = sum(graph.storages[s].nbytes for s in set(graph.outputs) if not graph.is_free(s))
    room = budget_bytes - graph.static_bytes - held
    selection = select_saved(graph, room, seconds=seconds, overlapping=bool(graph.tiers), effort=effort)
    if selection is None:
        return float("inf")
    if graph.tiers or graph.is_tiled:
        return selection.bound_seconds
    later = least_seconds_over_time(graph, budget_bytes, integer=False, seconds=seconds, effort=effort)
    if later > selection.bound_seconds and len(graph.ops) <= LARGE_STEP:
        whole = least_seconds_over_time(graph, budget_bytes, integer=True, seconds=seconds, effort=effort)
        later = max(later, whole)
    return max(selection.bound_seconds, later)


def widest_op_bytes(graph: StepGraph) -> int:
    """Bytes of the widest op in its leanest variant: operands, results, workspace, static bytes, earlier gradients."""
    held = graph.held_to_the_end()
    produced: set[int] = set()
    wall = static_bytes = graph.static_bytes
    for op in graph.ops:
        touched = {s for s in (*op.reads, *op.writes) if not graph.is_free(s)} | produced
        nbytes = sum(graph.storages[s].nbytes for s in touched)
        if not held.issuperset(op.in_place_over):
            nbytes -= graph.storages[op.writes[0]].nbytes
        workspace = min((variant.workspace_bytes for variant in op.variants), default=op.workspace_bytes)
        wide = nbytes + workspace
        if op.by_slices is not None and op.by_slices.first:
            wide = min(wide, _slice_bytes(graph, op, touched))
        wall = max(wall, static_bytes + wide)
        produced.update(s for s in op.writes if s in held)
    if graph.after_step_bytes:
        wall = max(wall, static_bytes + graph.gradient_bytes + graph.after_step_bytes)
    return wall


def _slice_bytes(graph: StepGraph, op: Op, touched: set[int]) -> int:
    """Least bytes of an op run slice by slice: operands and results cut by samples need not be in memory whole."""
    slices = op.by_slices
    assert slices is not None
    whole = sum(graph.storages[s].nbytes for s in touched if s not in slices.reads and s not in op.writes)
    made = sum(slices.slice_bytes(s, graph.storages[s].nbytes) for s in op.writes)
    return whole + made + slices.workspace_bytes
