"""The program: the exact order in which a step computes and frees.

A planner decides an order of ops in which forward ops may appear again (recomputation); `program_of` turns
it into instructions, freeing every storage right after its last read and overwriting an operand in place
where it dies. That is also what the runtime executes, since generated code drops each value after its last
use, so a program is not a wish but a description.

Known limits: of one storage at most one copy is alive, the one written last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from memfit.step.graph import Op, StepGraph

__all__ = ["Action", "Instruction", "Program", "as_they_run", "plain_order", "plain_program", "program_of"]


class Action(StrEnum):
    """What an instruction does."""

    COMPUTE = "compute"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a program: `index` is an op for `COMPUTE`, or a storage for `FREE`.

    An op runs in `parts`, and its first result takes the memory of storage `over` if there is one.
    """

    action: Action
    index: int
    over: int | None = None
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The instructions of one step, forward to backward."""

    instructions: tuple[Instruction, ...]

    def order(self) -> list[int]:
        """The ops in the order they run, recomputed ones repeated."""
        return [i.index for i in self.instructions if i.action is Action.COMPUTE]

    def recomputed(self) -> list[int]:
        """Ops that run again, one entry for every extra run, in order."""
        seen: set[int] = set()
        again: list[int] = []
        for op in self.order():
            if op in seen:
                again.append(op)
            seen.add(op)
        return again


def plain_order(graph: StepGraph) -> list[int]:
    """Every op once, as captured."""
    return list(range(len(graph.ops)))


def plain_program(graph: StepGraph) -> Program:
    """The unplanned step, as eager autograd runs it.

    It differs from `program_of(plain_order)`: nothing is overwritten in place that the model did not
    overwrite itself, every op runs whole, and nothing is freed before the last op that reads it without memfit.
    """
    return program_of(graph.without_memfit(), plain_order(graph))


def as_they_run(graph: StepGraph, order: Sequence[int]) -> list[Op]:
    """The ops of an order, those that run again as they do then (`Op.later`)."""
    ran: set[int] = set()
    ops: list[Op] = []
    for index in order:
        ops.append(graph.ops[index].later if index in ran else graph.ops[index])
        ran.add(index)
    return ops


def program_of(graph: StepGraph, order: Sequence[int], *, in_place: bool = True) -> Program:
    """Adds frees and in-place marks to an order of ops.

    Every read uses the copy written last; a copy is freed right after its last read, or at once if nothing
    reads it. What the caller holds (outputs, gradients) is never freed and never written twice.

    Args:
        graph: the step; each op runs in its `parts`.
        order: op indices; forward ops may repeat, before or after the loss op.
        in_place: overwrite operands that die where the op allows it.

    Returns:
        The program.
    """
    held = graph.held_to_the_end()
    written_at: dict[int, int] = {}
    last_read: dict[tuple[int, int], int] = {}
    ops = as_they_run(graph, order)
    for position, op in enumerate(ops):
        for storage in op.reads:
            if storage in written_at:
                last_read[storage, written_at[storage]] = position
        for storage in op.writes:
            if storage not in held:
                written_at[storage] = position
                last_read[storage, position] = position
    dying: list[list[int]] = [[] for _ in order]
    for (storage, _), position in last_read.items():
        if storage not in held:
            dying[position].append(storage)

    instructions: list[Instruction] = []
    for position, index in enumerate(order):
        op, dead = ops[position], dying[position]
        choices = op.in_place_over if in_place and op.in_place_over and op.writes[0] not in dead else ()
        over = next((s for s in choices if s in dead), None)
        instructions.append(Instruction(Action.COMPUTE, index, over, op.parts))
        instructions.extend(Instruction(Action.FREE, s) for s in dead if s != over)
    return Program(instructions=tuple(instructions))
