"""Wraps a lowered graph as the function that AOTAutograd calls; out-of-memory errors name the plan.

AOTAutograd passes operands in a list ("boxed"), so that each operand is freed after its last use. A runner
(`memfit.runtime.runner`) makes the graph callable in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memfit.errors import OutOfMemoryError
from memfit.profiling.memory import largest_tensors
from memfit.runtime.deferred_backward import LATER, Later, in_two
from memfit.runtime.dispatch import call_cheaply
from memfit.runtime.emitter import OVERWRITTEN
from memfit.runtime.lowering import attach_metadata_only
from memfit.runtime.offload.graph_calls import forget_side_effects
from memfit.runtime.runner import Runner
from memfit.torch_compat.core import backward_keeps_graph

__all__ = ["boxed"]

log = logging.getLogger(__name__)

_TOLD = 6
"""Number of operands whose shapes an error names."""


def boxed(
    gm: fx.GraphModule, describe: Callable[[], str], *, runner: Runner, later: Later | None
) -> Callable[..., Any]:
    """The graph as a function that takes its arguments in a list and empties that list while it runs."""
    attach_metadata_only(gm)
    forget_side_effects(gm.graph)
    call_cheaply(gm.graph)
    placeholders = gm.graph.find_nodes(op="placeholder")
    overwritten = [i for i, node in enumerate(placeholders) if node.meta.get(OVERWRITTEN)]
    if later is not None and any(node.meta.get(LATER) for node in gm.graph.nodes):
        forward = in_two(gm, later, runner)
    else:
        forward = runner(gm)

    def run(operands: list[Any]) -> Any:
        first = operands[:_TOLD]
        shapes = [tuple(t.shape) for t in first if isinstance(t, torch.Tensor) and t.dim() > 0]
        del first
        if overwritten and backward_keeps_graph():
            # backward(retain_graph=True): saved tensors must outlive this pass, so copies are overwritten.
            log.warning("retain_graph takes more memory than the plan, which writes over saved tensors")
            for position in overwritten:
                operands[position] = operands[position].clone()
        try:
            return forward(operands)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"out of memory in a fitted step (first operands {shapes}): {error}\n{describe()}\n"
                f"largest live tensors: {largest_tensors()}\n"
                "free what else is in memory, or fit the model to a lower budget"
            ) from error

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
