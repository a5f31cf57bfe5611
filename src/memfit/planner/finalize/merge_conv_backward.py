"""Two ops that are the halves of one call run in that call where no storage has to be freed between them.

Capture computes the two gradients of a convolution one after the other, so that the input can be freed before its
gradient is made (`memfit.passes.conv_backward_split`). Where memory allows, computing both at once is quicker: one call
instead of two, in the kernel's own order. A program states this by its order alone: of two adjacent halves, the second
runs with the first. `side_by_side` delays the frees between halves where the peak leaves room.

Known limits: the time of a call for both is not profiled; the times of the halves are counted, so steps are somewhat
quicker than predicted.
"""

from __future__ import annotations

from memfit.ir.graph import StepGraph, total_bytes
from memfit.ir.instructions import Compute, Free, computes_in, freed_in
from memfit.ir.program import Program, are_halves
from memfit.sim.simulator import simulate

__all__ = ["side_by_side"]


def side_by_side(graph: StepGraph, program: Program, limit_bytes: int) -> Program:
    """The program with halves next to each other where the peak stays within a limit.

    Args:
        graph: the step.
        program: the program; the order of its ops stays.
        limit_bytes: for the peak.
    """
    bytes_at = simulate(graph, program).bytes_at
    instructions = list(program.instructions)
    first: int | None = None
    for place, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        if first is not None and are_halves(graph, program.instructions[first], instruction):
            frees = program.instructions[first + 1 : place]
            ahead, here = (graph.ops[i.op] for i in computes_in((program.instructions[first], instruction)))
            more = total_bytes(graph, freed_in(frees))
            more += max(0, ahead.workspace_bytes - here.workspace_bytes)
            if bytes_at[place] + more <= limit_bytes:
                instructions[first + 1 : place + 1] = [instruction, *frees]
        first = place if isinstance(instruction, Compute) else None
    return Program(instructions=tuple(instructions))
