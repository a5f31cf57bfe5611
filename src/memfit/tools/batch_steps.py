"""The step of a model at any batch size: captured at a few sizes, interpolated at the others.

Known limits: if the model runs other ops at other sizes, every size that is asked for is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.loss.reading import LossFunction
from memfit.capture.training_step import Capture
from memfit.compiler.plan import CompiledPlan
from memfit.compiler.proving import prove
from memfit.compiler.request import Progress, Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.errors import SpecError
from memfit.ir.graph import StepGraph
from memfit.ir.tiers import Tier
from memfit.planner.analysis.batch_scaling import difference, scaled
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.offload.model import has_room, peak_bytes
from memfit.sim.simulator import simulate_baseline

__all__ = ["BatchSteps", "LowestOrder", "baseline_peak", "settled"]

log = logging.getLogger(__name__)

_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LowestOrder:
    """An order with approximately the least peak of a strategy.

    Attributes:
        order: order of ops; None for the step without memfit.
        placed: tiers of the swapped storages; second runs of their ops stand for transfers back.
    """

    order: list[int] | None
    placed: Mapping[int, Tier]

    def peak_bytes(self, graph: StepGraph) -> int:
        """Peak of the order at a batch size whose step has the same ops."""
        return baseline_peak(graph) if self.order is None else peak_bytes(leanest(graph), self.order, self.placed)

    def fits(self, graph: StepGraph, budget_bytes: int) -> bool:
        """Whether the peak is within the budget and the tiers have space."""
        return has_room(graph, self.placed) and self.peak_bytes(graph) <= budget_bytes


class BatchSteps:
    """The step of a model at any batch size."""

    def __init__(
        self,
        model: nn.Module,
        make_args: Callable[[int], Any],
        make_loss: Callable[[int], LossFunction | None] | None,
        request: Request,
        progress: Progress | None,
    ) -> None:
        self.model, self.make_args, self.make_loss = model, make_args, make_loss
        self.request, self.progress = request, progress
        self.captured: dict[int, tuple[Capture, StepGraph]] = {}
        self.lowest: dict[int, LowestOrder] = {}
        self.vary = False

    def asked(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any], Request]:
        """Inputs and request for one batch size."""
        loss_fn = None if self.make_loss is None else self.make_loss(batch)
        request = replace(self.request, loss_fn=loss_fn, label=f"{type(self.model).__name__} at batch {batch}")
        return (*_inputs(self.make_args(batch)), request)

    def capture(self, batch: int) -> StepGraph:
        """Captures and profiles the step at one batch size."""
        if batch not in self.captured:
            args, kwargs, request = self.asked(batch)
            here = capture_and_profile(self.model, args, kwargs, request, progress=self.progress)
            if not self.vary:
                self.vary = any(difference(here[1], graph) for _, graph in self.captured.values())
            if self.vary:
                log.info("the model runs other ops at other batch sizes; batch %d is captured", batch)
            self.captured[batch] = here
        return self.captured[batch][1]

    def at(self, batch: int) -> StepGraph:
        """The step at a batch size, captured or interpolated between the nearest captured ones."""
        if batch in self.captured or self.vary:
            return self.capture(batch)
        below = max((b for b in self.captured if b < batch), default=min(self.captured))
        above = min((b for b in self.captured if b > batch and b != below), default=0)
        if not above:
            below, above = min(self.captured), max(self.captured)
        return scaled(self.captured[below][1], below, self.captured[above][1], above, batch)

    def plan(self, batch: int, budget_bytes: int) -> CompiledPlan:
        """Plans the step at a batch size, and proves the plan if requested."""
        self.capture(batch)
        capture, graph = self.captured[batch]
        args, kwargs, request = self.asked(batch)
        plan = plan_captured(self.model, args, kwargs, capture, graph, request, budget_bytes, progress=self.progress)
        return prove(self.model, args, kwargs, plan, progress=self.progress) if request.prove else plan


def _inputs(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match made:
        case (tuple() | list() as args, dict() as kwargs):
            return tuple(args), dict(kwargs)
        case dict():
            return (), dict(made)
        case tuple() | list():
            return tuple(made), {}
        case torch.Tensor():
            return (made,), {}
    raise SpecError(
        f"make_args must return a tuple, a dict, or both as (tuple, dict) (returned: {type(made).__name__})"
    )


def settled(steps: BatchSteps, search: Callable[[], int]) -> int:
    """Repeats a search, each time with a capture at the size it found, until it finds a captured size."""
    found = search()
    for _ in range(_ROUNDS):
        if found == 0 or found in steps.captured:
            break
        steps.capture(found)
        found = search()
    return found


def baseline_peak(graph: StepGraph) -> int:
    """Peak of the baseline step."""
    return simulate_baseline(graph).peak_bytes
