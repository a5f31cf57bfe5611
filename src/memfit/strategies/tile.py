"""`tile:HxW`: tiles of a fixed grid, the longest possible runs of ops, every result recomputed for the backward pass.

This is how segmented fused-tiled execution (SFT: Xu et al., CC 2022) trains a trunk of convolutions on huge images:
each tile goes through the whole trunk in the forward pass, nothing is saved, and each tile is recomputed in the
backward pass. The strategy is for comparison. One run over a whole trunk makes halos that grow from op to op; `auto`
cuts runs where that pays.

Known limits: there is one segment, and runs end where the step ends them; the segments of SFT itself are chosen by
hand.
"""

from __future__ import annotations

from memfit.ir.fusion import fuse, linked, runs_by_slices
from memfit.ir.graph import StepGraph
from memfit.ir.instructions import Compute, Free, Instruction
from memfit.ir.program import Program, are_recomputed, as_they_run, assembled, dying_after
from memfit.planner.search.lazy_recompute import lazy_order

__all__ = ["grid_of", "program"]


def grid_of(parameter: str) -> tuple[int, int] | None:
    """The grid that a parameter such as `4x4` stands for; None if it is not a grid."""
    rows, cross, columns = parameter.partition("x")
    if not cross or not rows.isdecimal() or not columns.isdecimal() or min(int(rows), int(columns)) < 1:
        return None
    return int(rows), int(columns)


def program(graph: StepGraph) -> Program:
    """The program of a step captured for the grid; ignores the budget."""
    order = lazy_order(graph, ())
    ops = as_they_run(graph, order)
    dying = dying_after(graph, ops)
    runs = runs_by_slices(graph, ops, are_recomputed(order), dying)
    longest = [fuse(graph, run.part(first, stop))[0] for run in runs for first, stop in linked(run)]

    def alone(position: int) -> list[Instruction]:
        frees = [Free(storage) for storage in dying[position]]
        return [Compute(order[position], chunks=ops[position].chunks), *frees]

    return assembled(order, ops, dying, longest, alone)
