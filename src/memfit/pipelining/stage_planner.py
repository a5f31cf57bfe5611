"""Plans the stages between given cuts, each within the budget of its device.

Every stage is captured and planned like any step, with as many micro-batches under way as the schedule has there
(`memfit.planner.under_way`); the schedule is then simulated with the planned times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.capture.grids import grids
from memfit.capture.trace import Capture
from memfit.errors import BudgetError
from memfit.pipelining.budgets import fits, shares
from memfit.pipelining.cuts import Cut, find_cuts
from memfit.pipelining.forward_graph import ForwardGraph
from memfit.pipelining.question import Found, Question, StagePlan
from memfit.pipelining.stage_steps import capture_stage, deferring, state_bytes
from memfit.pipelining.stages import Stage, cut_into_stages
from memfit.planner.balance import CutPlace
from memfit.planner.schedule import Schedule, device_peaks, most_under_way, simulate_schedule
from memfit.planner.under_way import PlannedStage, Traffic, plan_always, plan_never, plan_stage
from memfit.step.codec import graph_digest
from memfit.step.graph import StepGraph
from memfit.units import format_bytes

__all__ = ["DoesNotFit", "StagePlanner"]

_ROUNDS = 3
"""How often what backward passes in two parts take too much is taken from what stages may plan with."""


@dataclass
class DoesNotFit(Exception):
    """A stage for which no plan was found."""

    stage: int
    cause: BudgetError = field(repr=False)


class StagePlanner:
    """Plans stages, and remembers what it captured and planned.

    Attributes:
        question: what is asked; its budgets may change from plan to plan.
        places: where a cut is possible, in order, with the beginning and the end.
        state_bytes: by name what a parameter or buffer takes.
    """

    def __init__(self, forward: ForwardGraph, leaves: Sequence[Any], question: Question, device: torch.device) -> None:
        self.question = question
        self.state_bytes = state_bytes(forward, question, device)
        self._forward = forward
        self._leaves = leaves
        self._device = device
        self._cuts = find_cuts(forward)
        self.places = [
            CutPlace(position=0, nbytes=0),
            *(CutPlace(position=cut.position, nbytes=cut.nbytes) for cut in self._cuts),
            CutPlace(position=len(forward.calls), nbytes=0),
        ]
        self._captures: dict[tuple[int, ...], tuple[Capture, StepGraph]] = {}  # by ends, and a grid
        self._deferred: dict[tuple[int, ...], tuple[Capture, StepGraph]] = {}
        self._planned: dict[tuple[Any, ...], tuple[PlannedStage, PlannedStage | None]] = {}

    def whole(self) -> tuple[Capture, StepGraph]:
        """The step of the whole model, as one stage."""
        (stage,) = cut_into_stages(self._forward, [])
        made = capture_stage(stage, self._leaves, self.question, self._device)
        self._captures[0, len(self.places) - 1] = made
        return made

    def plan(self, schedule: Schedule, places: Sequence[int]) -> Found:
        """Plans every stage between cuts at places.

        Raises:
            DoesNotFit: if one of them does not.
        """
        stages = self._stages(places)
        plans = self._plans(schedule, stages, places)
        plans = [self._with_last(plan, schedule, plans) for plan in plans]
        return Found(
            schedule=schedule,
            cuts=tuple(self.places[place].position for place in places),
            stages=tuple(plans),
            timeline=simulate_schedule(schedule, [plan.times for plan in plans]),
            peak_bytes=tuple(self._device_peaks(schedule, plans)),
            counted_twice=self._counted_twice(stages),
        )

    def _plans(self, schedule: Schedule, stages: Sequence[Stage], places: Sequence[int]) -> list[StagePlan]:
        """Plans of stages that keep the budgets of their devices.

        A stage's plan counts what micro-batches hold between their passes. Where backward passes are split they hold
        something between the parts too; what that takes too much is taken from what the stages may plan with.
        """
        whole, under_way = self.question.budget_bytes, most_under_way(schedule)
        budgets = shares(whole, schedule)
        device_of = schedule.device_of()
        taken = dict.fromkeys(device_of.values(), 0)
        for _ in range(_ROUNDS):
            plans: list[StagePlan] = []
            for stage in stages:
                budget = budgets[stage.index]
                room = None if budget is None else budget - taken[device_of[stage.index]]
                try:
                    plans.append(self._stage_plan(schedule, stage, places, room, under_way[stage.index]))
                except BudgetError as error:
                    raise DoesNotFit(stage.index, error) from error
            peaks = self._device_peaks(schedule, plans)
            if whole is None or not schedule.splits_backward or fits(peaks, whole):
                return plans
            over = [max(0, peak - budget) for peak, budget in zip(peaks, whole, strict=True)]
            for device, more in enumerate(over):
                taken[device] += more // list(device_of.values()).count(device)
        assert whole is not None
        full = over.index(max(over))
        too_much = BudgetError(
            f"{schedule.name} takes {format_bytes(peaks[full])} of device {full}; '1f1b' may take less",
            budget_bytes=whole[full],
            least_bytes=peaks[full],
        )
        raise DoesNotFit(max(stage for stage, device in device_of.items() if device == full), too_much)

    def _stage_plan(
        self, schedule: Schedule, stage: Stage, places: Sequence[int], budget: int | None, under_way: int
    ) -> StagePlan:
        ends = [0, *places, len(self.places) - 1]
        key = ends[stage.index], ends[stage.index + 1]
        capture, graph = self._captured(stage, key, schedule)
        may_tile = self.question.levers == "all" or "tile" in self.question.levers
        try:
            return self._plan_stage(stage, capture, graph, budget, under_way)
        except BudgetError as error:
            if not may_tile or budget is None or self.question.policy != "auto":
                raise
            return self._in_tiles(stage, key, schedule, budget, under_way, error)

    def _in_tiles(
        self,
        stage: Stage,
        ends: tuple[int, int],
        schedule: Schedule,
        budget: int,
        under_way: int,
        failure: BudgetError,
    ) -> StagePlan:
        """In tiles as coarse as the budget allows; of all that fail the error of the one that takes the least."""
        capture, graph = self._captures[ends]
        for grid in grids(capture, budget - graph.static_bytes - graph.gradient_bytes):
            tiled = self._captured(stage, (*ends, *grid), schedule)
            if not tiled[1].is_tiled:
                continue
            try:
                return self._plan_stage(stage, *tiled, budget, under_way)
            except BudgetError as error:
                failure = min(failure, error, key=lambda one: one.least_bytes)
        raise failure

    def _captured(self, stage: Stage, key: tuple[int, ...], schedule: Schedule) -> tuple[Capture, StepGraph]:
        """The step of a stage between two ends, perhaps in tiles of the grid that follows these."""
        if key not in self._captures:
            self._captures[key] = capture_stage(stage, self._leaves, self.question, self._device, grid=key[2:])
        if not schedule.splits_backward:
            return self._captures[key]
        if key not in self._deferred:
            self._deferred[key] = deferring(*self._captures[key])
        return self._deferred[key]

    def _with_last(self, plan: StagePlan, schedule: Schedule, plans: Sequence[StagePlan]) -> StagePlan:
        """The plan with nothing run again for the last micro-batch, if that fits beside what the others keep."""
        budgets = self.question.budget_bytes
        if self.question.policy != "auto" or budgets is None or plan.planned.timeline.recompute_seconds == 0.0:
            return plan
        received = sum(c.nbytes for c in plan.stage.arriving)
        last = plan_never(plan.graph, None, Traffic(received_bytes=received, deferred=plan.capture.deferred))
        more = replace(plan, last=last)
        others = [more if one is plan else one for one in plans]
        device = schedule.device_of()[plan.stage.index]
        has_room = self._device_peaks(schedule, others)[device] <= budgets[device]
        return more if has_room and schedule.num_microbatches > 1 else plan

    def _device_peaks(self, schedule: Schedule, plans: Sequence[StagePlan]) -> list[int]:
        count = schedule.num_microbatches
        twice = self._counted_twice([plan.stage for plan in plans])
        return device_peaks(schedule, lambda stage, microbatch: plans[stage].memory(microbatch, count), twice)

    def _counted_twice(self, stages: Sequence[Stage]) -> Callable[[frozenset[int]], int]:
        state_bytes = self.state_bytes

        def counted_twice(numbers: frozenset[int]) -> int:
            names = [name for number in numbers for name in stages[number].states]
            return sum(state_bytes[name] for name in names) - sum(state_bytes[name] for name in set(names))

        return counted_twice

    def _stages(self, places: Sequence[int]) -> list[Stage]:
        chosen: list[Cut] = [self._cuts[place - 1] for place in places]
        return cut_into_stages(self._forward, chosen)

    def _plan_stage(
        self, stage: Stage, capture: Capture, graph: StepGraph, budget: int | None, under_way: int
    ) -> StagePlan:
        received = sum(c.nbytes for c in stage.arriving)
        traffic = Traffic(under_way=under_way, received_bytes=received, deferred=capture.deferred)
        # Blocks of a model are alike, and so are stages made of as many of them.
        alike = graph_digest(graph), graph.static_bytes, traffic, budget
        if alike in self._planned:
            planned, last = self._planned[alike]
            return StagePlan(stage=stage, capture=capture, graph=graph, planned=planned, last=last, under_way=under_way)
        plan: Callable[..., PlannedStage]
        policy, last = self.question.policy, None
        if policy == "auto" and budget is not None:
            planned = plan_stage(graph, budget, traffic, seconds=self.question.search_seconds)
        else:
            plan = plan_never if policy in ("auto", "never") else plan_always
            planned = plan(graph, budget, traffic)
            last = plan_never(graph, budget, traffic) if policy == "except_last" else None
        made = StagePlan(stage=stage, capture=capture, graph=graph, planned=planned, last=last, under_way=under_way)
        if budget is not None and planned.peak_bytes > budget:
            raise BudgetError(
                f"stage {stage.index} with policy {policy!r} needs {format_bytes(planned.peak_bytes)} of "
                f"{format_bytes(budget)}; policy 'auto' may need less",
                budget_bytes=budget,
                least_bytes=planned.peak_bytes,
            )
        self._planned[alike] = planned, last
        return made
