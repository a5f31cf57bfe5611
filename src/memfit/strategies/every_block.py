"""`every-block`: each repeated block of the model is a checkpointed segment.

This is the method of `gradient_checkpointing_enable()` of transformers and `set_grad_checkpointing()` of timm. The
blocks are the modules that repeat under one container (`layer1.0`, `blocks.3`, `h.5`); a model without such modules
falls back to the blocks of the chain.
"""

from __future__ import annotations

import re

from memfit.ir.graph import Phase, StepGraph
from memfit.planner.analysis.chain import cut_chain
from memfit.planner.search.segments import segment_order, starts_of

__all__ = ["block_name", "order"]

_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?:\.(?:blocks?|layers?)\.\d+)*(?=\.|$)")


def block_name(module: str) -> str:
    """The outermost numbered part of a module's name, or the block in it.

    `layer1.0.conv2` is in `layer1.0`, `stages.2.blocks.4.norm` in `stages.2.blocks.4`, `head` in none.
    """
    found = _NUMBERED.match(module)
    return found.group() if found else ""


def order(graph: StepGraph, budget_bytes: int | None) -> list[int]:
    """Numbered modules are recomputed, results of ops between them are saved; ignores the budget."""
    forward = [i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
    names: list[str] = []
    starts: list[int] = []
    for index in forward:
        module = graph.ops[index].module
        name = block_name(module) if module or not names else names[-1]
        if not names or name != names[-1]:
            names.append(name)
            starts.append(index)
    if len({n for n in names if n}) < 2:
        return segment_order(graph, starts_of(cut_chain(graph).blocks))
    plain = {number for number, name in enumerate(names) if not name}
    return segment_order(graph, starts[1:], saved_segments=plain)
