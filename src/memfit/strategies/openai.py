"""The three checkpoint choices of OpenAI's gradient-checkpointing: `speed`, `memory`, `collection`.

- **speed** saves the outputs of convolutions and matrix products, which take long to recompute.
- **memory** saves √n automatically found bottlenecks: places where one storage separates the graph. Where the
  graph has none, the narrowest cuts of the chain serve.
- **collection** saves the outputs of the modules that the user names.

Every other result is recomputed right before its first use.

Source: github.com/cybertronai/gradient-checkpointing (Salimans and Bulatov, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from memfit.errors import SpecError
from memfit.ir.graph import Phase, StepGraph
from memfit.planner.analysis.chain import cut_chain
from memfit.planner.search.lazy_recompute import lazy_order
from memfit.planner.search.segments import segment_order

__all__ = ["collection_order", "heavy_storages", "memory_order", "speed_order"]

_HEAVY = ("convolution", "mm", "bmm", "addmm", "baddbmm", "linear", "scaled_dot_product", "attention", "einsum")


def heavy_storages(graph: StepGraph) -> set[int]:
    """Results of forward convolutions, matrix products and attention."""
    return {
        s
        for op in graph.ops
        if op.phase is Phase.FORWARD and any(word in op.target for word in _HEAVY)
        for s in op.writes
    }


def speed_order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """Saves results that are slow to compute; ignores the budget."""
    return lazy_order(graph, heavy_storages(graph))


def memory_order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """Saves √n bottlenecks; ignores the budget."""
    blocks = cut_chain(graph).blocks
    wide = max((graph.storages[s].nbytes for b in blocks for s in b.boundary), default=0)
    single = [b for b in blocks[1:] if sum(graph.storages[s].nbytes > wide // 64 for s in b.boundary) == 1]
    places = single or list(blocks[1:])
    count = math.isqrt(len(places)) if places else 0
    step = max(1, len(places) // max(1, count))
    return segment_order(graph, [b.first for b in places[::step]])


def collection_order(graph: StepGraph, budget_bytes: int | None, *, modules: Sequence[str]) -> list[int]:
    """Saves the outputs of the named modules; ignores the budget.

    Raises:
        SpecError: if a module has no op.
    """
    saved: set[int] = set()
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    for module in modules:
        inside = [op for op in forward if op.module == module or op.module.startswith(module + ".")]
        if not inside:
            known = sorted({op.module for op in forward if op.module})
            raise SpecError(f"no op of the step belongs to module {module!r}; modules: {', '.join(known[:20])}")
        outside = {s for op in graph.ops if op not in inside for s in op.reads}
        outputs = {s for op in inside for s in op.writes if s in outside}
        saved.update(outputs or inside[-1].writes)
    return lazy_order(graph, saved)
