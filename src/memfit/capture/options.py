"""How a training step is captured: choices that a plan, or the user's loop, makes for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.capture.dynamo.symbolic_call import SymbolicCall
from memfit.capture.dynamo.traced_graph import Reader
from memfit.ops.accumulation import Accumulate

__all__ = ["DEFAULT_OPTIONS", "CaptureOptions"]


def _never(name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How a training step is captured.

    Attributes:
        separate: tells which weight gradients of concatenations are computed part by part, see
            `memfit.passes.concat_weight_gradients`.
        grid: numbers of tiles for the lever `tile`, see `memfit.passes.read_joint.read_joint`.
        accumulate: how gradients of parameters are added to `.grad` inside the step; None if autograd adds them.
        cut: whether outputs of the last graph that the loss does not use are detached.
        without_gradient: places of outputs of the last graph that are detached as well.
        cut_between: whether outputs of earlier graphs that no gradient of the loss reaches are detached.
        decide: whether branches on inputs are decided at capture; otherwise they break the graph.
        by_use: whether graphs take every input with several uses once per use
            (`memfit.capture.gradients.shared_inputs`).
        as_compiled: whether code that asks is told that it is compiled; for a step that is only estimated, where eager
            mode would look at values and there are none.
        symbolic: the call of the module for many sizes, from which the graph for these inputs is made.
        checkpointing: `"refuse"` or `"replace"`, how checkpoints of the model itself are treated.
    """

    separate: Callable[[str], bool] = _never
    grid: tuple[int, ...] = ()
    accumulate: Accumulate | None = None
    cut: bool = True
    without_gradient: frozenset[int] = frozenset()
    cut_between: bool = False
    decide: bool = True
    by_use: bool = False
    as_compiled: bool = False
    symbolic: SymbolicCall | None = None
    checkpointing: str = "refuse"

    def reader(self) -> Reader:
        """How joint graphs are read."""
        return Reader(
            separate=self.separate,
            grid=self.grid,
            accumulate=self.accumulate,
            replaced=self.checkpointing == "replace",
        )


DEFAULT_OPTIONS = CaptureOptions()
