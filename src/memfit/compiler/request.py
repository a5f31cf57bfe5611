"""The request for a plan, and what a plan was made from."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture.loss.reading import LossFunction
from memfit.capture.optimizer.state import OptimizerPart
from memfit.capture.optimizer.unwrapped import OptimizerLike
from memfit.capture.options import DEFAULT_OPTIONS, CaptureOptions
from memfit.capture.state.input_signature import Signature
from memfit.capture.training_step import Capture
from memfit.feedback import Progress
from memfit.ir.graph import StepGraph
from memfit.runtime.executable import PlannedCall

__all__ = ["Planned", "Progress", "Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Requirements for a plan, in addition to the model and its inputs.

    Attributes:
        budget: bytes, or a string such as `"8GiB"`, `"60%"` of the device, `"auto"` for all that is free.
        loss_fn: takes the output, returns a scalar.
        optimizer: optimizer, whose state and step count towards the budget; or the bytes of its state.
        strategy: name of a planner.
        levers: `"bitwise"`, `"all"` or a tuple of lever names.
        tiers: tiers to which storages may be swapped out; see `memfit.runtime.offload.tiers.parse_tiers`.
        prove: whether to run the plan once, compare it with the baseline step, and correct it.
        exact: `"bitwise"`, or `"rounding"` to accept a plan whose results differ by rounding.
        label: name of the planned step, for people.
        search_seconds: work of the search of `"auto"`, in nominal seconds; up to four times that while far from the
            bound.
        any_speed: whether `"auto"` takes any plan that fits, instead of a fast one.
        beside_bytes: bytes in memory in addition to the module and its inputs, such as DDP's buckets.
        told: whether the loop, not a guess, tells which outputs left on a module or in a hook get a gradient.
        proves_gradients: whether gradients are compared too; False if the loop brings others than the loss alone.
        backward_in_autocast: whether the loop runs the backward pass inside the autocast region of the forward pass.
        plain: whether a step may run without a plan where its baseline step fits the budget.
        capture: how the step is captured; the tiles of a capture, and which weight gradients it separates, are the
            planner's choices.
    """

    budget: int | str
    loss_fn: LossFunction | None = None
    optimizer: OptimizerLike | OptimizerPart | None = None
    strategy: str = "auto"
    levers: str | tuple[str, ...] = "bitwise"
    tiers: str | None = None
    prove: bool = True
    exact: str = "bitwise"
    label: str = ""
    search_seconds: float = 8.0
    any_speed: bool = False
    beside_bytes: int = 0
    told: bool = False
    proves_gradients: bool = True
    backward_in_autocast: bool = False
    plain: bool = False
    capture: CaptureOptions = DEFAULT_OPTIONS

    @property
    def whole_optimizer(self) -> OptimizerLike | None:
        """The optimizer of all parameters, or the bytes that stand for it."""
        return self.optimizer.optimizer if isinstance(self.optimizer, OptimizerPart) else self.optimizer

    @property
    def tiles(self) -> bool:
        """Whether ops may run slice by slice where that changes the order of sums."""
        return self.levers == "all" or "tile" in self.levers


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Step and request that a plan was made from, and the signature of the calls that it is for.

    Attributes:
        capture: capture of the step.
        graph: profiled graph of the step.
        request: request for the plan.
        signature: signature of the inputs.
        is_measured: whether its ops were measured; otherwise their costs are scaled from those of another size.
        call: call that the proving run compiled, for the same module to reuse; it keeps the module alive.
    """

    capture: Capture
    graph: StepGraph
    request: Request
    signature: Signature
    is_measured: bool = True
    call: PlannedCall | None = None
