"""Plans the stages between given cuts, each within the budget of its device.

Every stage is captured and planned like any step, for the number of micro-batches that the schedule has in flight at
the stage (`memfit.planner.pipeline.stage_plan`), and with the part of its device's budget that the other stages of the
device leave (`memfit.planner.pipeline.memory_split`); the schedule is then simulated with the planned times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.training_step import Capture
from memfit.compiler.grid_choice import grids
from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.ir.serialization import graph_digest
from memfit.pipelining.config import Found, Question, StagePlan
from memfit.pipelining.partition.cut_points import Cut, find_cuts
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.pipelining.partition.stages import Stage, cut_into_stages
from memfit.pipelining.search.device_budgets import fits
from memfit.pipelining.search.split_backward import returning
from memfit.pipelining.search.stage_capture import capture_stage, deferring, passing_bytes, state_bytes
from memfit.planner.effort import Effort
from memfit.planner.pipeline.device_memory import device_peaks
from memfit.planner.pipeline.memory_split import DoesNotFit, rooms, share_budget
from memfit.planner.pipeline.partition import CutPlace
from memfit.planner.pipeline.schedule import Schedule, Task, most_in_flight, simulate_schedule, with_transfers
from memfit.planner.pipeline.stage_plan import PlannedStage, Traffic, plan_always, plan_never, plan_stage
from memfit.units import format_bytes

__all__ = ["StagePlanner"]

_ROUNDS = 3
"""Rounds in which the memory that split backward passes take above the budget is subtracted from the stages' budget."""

_CAPTURE_SECONDS = 6e-3
"""Nominal seconds to capture a stage, for each op of its step."""

_BRIEF = 0.2
"""Fraction of a search's work that is enough to compare limits of saved bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Requirements for the plan of a stage.

    Attributes:
        policy: checkpoint policy, see `memfit.pipelining.config.Question`.
        room_bytes: memory that a micro-batch may take; None for no limit.
        saved_limit_bytes: bytes that may be saved for it between its passes; None for no limit.
        in_flight: the largest number of micro-batches in flight at the stage.
        is_brief: whether the plan is only for a comparison of limits.
    """

    policy: str
    room_bytes: int | None
    saved_limit_bytes: int | None
    in_flight: int
    is_brief: bool


class StagePlanner:
    """Plans stages, and caches their captures and plans.

    Attributes:
        question: requirements for the pipeline; its budgets may change from plan to plan.
        places: places of possible cuts, in order, with the beginning and the end.
        state_bytes: bytes of each parameter or buffer, by name.
        effort: counts the work of all searches for plans of stages, and of their captures.
        until_seconds: the effort, in nominal seconds, after which only necessary plans are tried; None for no limit.
        any_will_do: whether the first plan that fits is enough.
    """

    def __init__(self, forward: ForwardGraph, leaves: Sequence[Any], question: Question, device: torch.device) -> None:
        self.question = question
        self.effort = Effort()
        self.until_seconds: float | None = None
        self.any_will_do = False
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
        self._captures: dict[tuple[int, ...], tuple[Capture, StepGraph]] = {}  # by ends and grid
        self._deferred: dict[tuple[int, ...], tuple[Capture, StepGraph]] = {}
        self._planned: dict[tuple[Any, ...], tuple[PlannedStage, PlannedStage | None]] = {}

    def whole(self) -> tuple[Capture, StepGraph]:
        """The step of the whole model, as one stage."""
        (stage,) = cut_into_stages(self._forward, [])
        return self._keep((0, len(self.places) - 1), capture_stage(stage, self._leaves, self.question, self._device))

    def _keep(self, key: tuple[int, ...], made: tuple[Capture, StepGraph]) -> tuple[Capture, StepGraph]:
        """Caches a capture, and counts its work."""
        self._captures[key] = made
        self.effort.charge(_CAPTURE_SECONDS * len(made[1].ops))
        return made

    def is_late(self) -> bool:
        """Whether only necessary plans are to be tried from now on."""
        return self.until_seconds is not None and self.effort.exceeds(self.until_seconds)

    def plan(self, schedule: Schedule, places: Sequence[int]) -> Found:
        """Plans every stage between cuts at places.

        Raises:
            DoesNotFit: if one of the stages does not fit.
        """
        stages = self._stages(places)
        plans = self._with_last(schedule, self._plans(schedule, stages, places))
        return Found(
            schedule=schedule,
            cuts=tuple(self.places[place].position for place in places),
            stages=tuple(plans),
            timeline=simulate_schedule(schedule, [plan.times for plan in plans]),
            peak_bytes=tuple(self._device_peaks(schedule, plans)),
            counted_twice=self._counted_twice(stages),
        )

    def _plans(self, schedule: Schedule, stages: Sequence[Stage], places: Sequence[int]) -> list[StagePlan]:
        """Plans of stages within the budgets of their devices.

        With split backward passes, the memory that stages hold between the two parts is known only after planning;
        memory above the budget is then subtracted from the stages' budget.
        """
        whole, taken = self.question.budget_bytes, [0] * len(schedule.orders)
        for _ in range(_ROUNDS):
            plans: dict[int, StagePlan] = {}
            for device, order in enumerate(with_transfers(schedule)):
                own = [stages[number] for number in sorted({action.stage for action in schedule.orders[device]})]
                budget = None if whole is None else whole[device] - taken[device]
                plans |= self._device_plans(schedule, order, own, places, budget)
            made = [plans[stage.index] for stage in stages]
            peaks = self._device_peaks(schedule, made)
            if whole is None or fits(peaks, whole):
                return made
            taken = [less + max(0, peak - one) for less, peak, one in zip(taken, peaks, whole, strict=True)]
            if not schedule.splits_backward or self.is_late():
                break
        assert whole is not None
        over = [peak - budget for peak, budget in zip(peaks, whole, strict=True)]
        full = over.index(max(over))
        way = "schedule '1f1b'" if self.question.policy == "auto" else "policy 'auto'"
        too_much = BudgetError(
            f"schedule {schedule.name!r} with policy {self.question.policy!r} takes {format_bytes(peaks[full])} of "
            f"device {full} and its {format_bytes(whole[full])}; {way} may take less",
            budget_bytes=whole[full],
            least_bytes=peaks[full],
        )
        raise DoesNotFit(max(action.stage for action in schedule.orders[full]), too_much)

    def _device_plans(
        self,
        schedule: Schedule,
        order: Sequence[Task],
        stages: Sequence[Stage],
        places: Sequence[int],
        budget: int | None,
    ) -> dict[int, StagePlan]:
        """Plans of the stages of one device."""
        in_flight = most_in_flight(schedule)
        ends = [0, *places, len(self.places) - 1]
        of = {stage.index: stage for stage in stages}

        def plan(
            number: int, room: int | None, limit: int | None = None, *, policy: str | None = None, brief: bool = False
        ) -> StagePlan:
            asked = _Asked(
                policy=policy or self.question.policy,
                room_bytes=room,
                saved_limit_bytes=limit,
                in_flight=in_flight[number],
                is_brief=brief,
            )
            return self._stage_plan(schedule, of[number], (ends[number], ends[number + 1]), asked)

        if budget is None:
            return {number: plan(number, None) for number in of}
        twice = self._counted_twice(stages)(frozenset(range(len(stages))))
        if self.question.policy == "auto":
            wanted = {number: plan(number, 0, policy="never").planned.memory for number in of}
            least = {number: plan(number, 0, policy="always").planned.saved_bytes for number in of}
            brief = functools.partial(plan, brief=True)
            return share_budget(
                *(order, wanted, least, budget + twice, plan),
                brief=brief,
                is_late=self.is_late,
                any_will_do=self.any_will_do,
            )
        lean = {number: plan(number, 0).planned.memory for number in of}
        return {number: plan(number, room) for number, room in rooms(order, lean, budget + twice).items()}

    def _stage_plan(self, schedule: Schedule, stage: Stage, ends: tuple[int, int], asked: _Asked) -> StagePlan:
        capture, graph = self._captured(stage, ends, schedule)
        may_tile = self.question.levers == "all" or "tile" in self.question.levers
        try:
            return self._plan_stage(stage, capture, graph, asked)
        except BudgetError as error:
            if not may_tile:
                raise
            return self._in_tiles(stage, ends, schedule, asked, error)

    def _in_tiles(
        self, stage: Stage, ends: tuple[int, int], schedule: Schedule, asked: _Asked, failure: BudgetError
    ) -> StagePlan:
        """Plans a stage in the coarsest tiles that fit; if none fit, raises the error with the least memory."""
        capture, graph = self._captures[ends]
        assert asked.room_bytes is not None
        for grid in grids(capture, asked.room_bytes - graph.static_bytes - graph.gradient_bytes):
            tiled = self._captured(stage, (*ends, *grid), schedule)
            if not tiled[1].is_tiled:
                continue
            try:
                return self._plan_stage(stage, *tiled, asked)
            except BudgetError as error:
                failure = min(failure, error, key=lambda one: one.least_bytes)
        raise failure

    def _captured(self, stage: Stage, key: tuple[int, ...], schedule: Schedule) -> tuple[Capture, StepGraph]:
        """The step of a stage; `key` holds its two ends, and the grid of its tiles if there is one."""
        if key not in self._captures:
            ends, grid = key[:2], key[2:]
            before = self._captures[ends][0] if grid else None
            made = capture_stage(stage, self._leaves, self.question, self._device, grid=grid, before=before)
            self._keep(key, made)
        if not schedule.splits_backward:
            return self._captures[key]
        if key not in self._deferred:
            self._deferred[key] = deferring(*self._captures[key])
        return self._deferred[key]

    def _with_last(self, schedule: Schedule, plans: Sequence[StagePlan]) -> list[StagePlan]:
        """The plans, without recomputation for the last micro-batch in the stages where this still fits."""
        plans, budgets = list(plans), self.question.budget_bytes
        if self.question.policy != "auto" or budgets is None or schedule.num_microbatches == 1:
            return plans
        for place, plan in enumerate(plans):
            if plan.planned.timeline.recompute_seconds:
                last = plan_never(plan.graph, None, _traffic(plan.stage, plan.capture, plan.graph))
                more = [*plans[:place], replace(plan, last=last), *plans[place + 1 :]]
                plans = more if fits(self._device_peaks(schedule, more), budgets) else plans
        return plans

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

    def _plan_stage(self, stage: Stage, capture: Capture, graph: StepGraph, asked: _Asked) -> StagePlan:
        traffic = _traffic(stage, capture, graph, in_flight=asked.in_flight)
        # Blocks of a model are alike, so stages with the same number of blocks are alike too.
        alike = graph_digest(graph), graph.static_bytes, traffic, asked
        if alike not in self._planned:
            self._planned[alike] = self._planned_as(graph, traffic, asked)
        planned, last = self._planned[alike]
        return StagePlan(
            stage=stage, capture=capture, graph=graph, planned=planned, last=last, in_flight=asked.in_flight
        )

    def _planned_as(
        self, graph: StepGraph, traffic: Traffic, asked: _Asked
    ) -> tuple[PlannedStage, PlannedStage | None]:
        """The plan of each micro-batch, and the plan of the last one if it differs."""
        room = asked.room_bytes
        if asked.policy == "auto" and room is not None:
            planned = plan_stage(
                *(graph, room, traffic),
                saved_limit_bytes=asked.saved_limit_bytes,
                seconds=self.question.search_seconds * (_BRIEF if asked.is_brief else 1.0),
                last_resort=not asked.is_brief,
                effort=self.effort,
            )
            return planned, None
        plan = plan_never if asked.policy in ("auto", "never") else plan_always
        last = plan_never(graph, room, traffic) if asked.policy == "except_last" else None
        return plan(graph, room, traffic), last


def _traffic(stage: Stage, capture: Capture, graph: StepGraph, *, in_flight: int = 1) -> Traffic:
    return Traffic(
        in_flight=in_flight,
        received_bytes=sum(c.nbytes for c in stage.arriving),
        passing_bytes=passing_bytes(stage),
        returning=returning(capture) if capture.deferred else frozenset(),
        deferred=capture.deferred,
        handed=frozenset(graph.ops[graph.loss_index - 1].reads) if stage.leaving else frozenset(),
        sent_bytes=sum(c.nbytes for c in stage.leaving),
        answer_bytes=sum(c.nbytes for c in stage.leaving if c.requires_grad),
        returned_bytes=sum(c.nbytes for c in stage.arriving if c.requires_grad),
    )
