"""Counts saved, recomputed and swapped activations: the forward results that the backward pass reads."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.ir.graph import Phase, StepGraph, StorageKind, total_bytes
from memfit.ir.program import Program
from memfit.planner.analysis.explain import saved_storages

__all__ = ["Activations", "count_activations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Saved, recomputed and swapped activations of a program.

    Attributes:
        retained: number saved in memory.
        recomputed: number freed and recomputed.
        retained_bytes: size of the saved ones.
        recomputed_bytes: size of the recomputed ones.
        swapped: number moved to a tier and back.
        swapped_bytes: size of the swapped ones.
    """

    retained: int
    recomputed: int
    retained_bytes: int
    recomputed_bytes: int
    swapped: int = 0
    swapped_bytes: int = 0

    @property
    def count(self) -> int:
        """Number of activations."""
        return self.retained + self.recomputed + self.swapped

    @property
    def retained_share(self) -> float:
        """Saved ones among all, by number."""
        return self.retained / max(1, self.count)

    @property
    def recomputed_share(self) -> float:
        """Recomputed ones among all, by number."""
        return self.recomputed / max(1, self.count)

    @property
    def swapped_share(self) -> float:
        """Swapped ones among all, by number."""
        return self.swapped / max(1, self.count)


def count_activations(graph: StepGraph, program: Program) -> Activations:
    """Divides the activations of a step into those that a program saves through the loss, swaps, or recomputes."""
    read = {s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
    all_of_them = {s for s in read if graph.storages[s].kind is StorageKind.FORWARD}
    swapped = all_of_them & (program.swapped() | program.tier_resident()).keys()
    retained = (all_of_them & saved_storages(graph, program)) - swapped
    recomputed = all_of_them - retained - swapped
    return Activations(
        retained=len(retained),
        recomputed=len(recomputed),
        retained_bytes=total_bytes(graph, tuple(retained)),
        recomputed_bytes=total_bytes(graph, tuple(recomputed)),
        swapped=len(swapped),
        swapped_bytes=total_bytes(graph, tuple(swapped)),
    )
