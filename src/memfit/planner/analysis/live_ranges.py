"""The lifetime of every copy of a storage in an order: when it is written, read and idle.

Local search works on `Spans`. Positions index the order; memory at a position is the memory in use while its op runs,
as the simulator counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memfit.ir.graph import StepGraph
from memfit.ir.instructions import Compute
from memfit.ir.program import are_recomputed, as_they_run, program_of
from memfit.sim.simulator import Timeline, simulate

__all__ = ["Copy", "Spans", "spans_of"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a storage: written at `born`, read at `reads` (ascending)."""

    storage: int
    born: int
    reads: tuple[int, ...]

    @property
    def dies(self) -> int:
        """Position after which the copy is freed."""
        return self.reads[-1] if self.reads else self.born


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """An order with the lifetimes of the storages that it writes.

    Attributes:
        order: op indices.
        copies: every copy of every storage that is not static and not held by the caller.
        again: for each position whether its op ran before.
        bytes_at: memory while each position runs, the frees after it not yet done.
        timeline: from the simulator.
    """

    order: tuple[int, ...]
    copies: tuple[Copy, ...]
    again: tuple[bool, ...]
    bytes_at: NDArray[np.int64]
    timeline: Timeline


def spans_of(graph: StepGraph, order: Sequence[int]) -> Spans:
    """Finds the lifetimes in an order."""
    held = graph.held_to_the_end()
    current: dict[int, tuple[int, list[int]]] = {}
    copies: list[Copy] = []
    for position, op in enumerate(as_they_run(graph, order)):
        for storage in op.reads:
            if storage in current:
                current[storage][1].append(position)
        for storage in op.writes:
            if storage in held:
                continue
            if storage in current:
                born, reads = current[storage]
                copies.append(Copy(storage, born, tuple(reads)))
            current[storage] = (position, [])
    copies.extend(Copy(s, born, tuple(reads)) for s, (born, reads) in current.items())
    program = program_of(graph, order)
    timeline = simulate(graph, program)
    computing = np.array([isinstance(i, Compute) for i in program.instructions])
    bytes_at = np.array(timeline.bytes_at, dtype=np.int64)[computing]
    again = tuple(are_recomputed(order))
    return Spans(order=tuple(order), copies=tuple(copies), again=again, bytes_at=bytes_at, timeline=timeline)
