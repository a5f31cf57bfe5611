"""Finds cuts, schedule and the plan of each stage: the plan of a pipeline.

Cuts are proposed by times of calls and a guess of what recomputation will take (`memfit.planner.balance`). Each stage
of a proposal is captured and planned like any step, with as many micro-batches under way as the schedule has there
(`memfit.planner.under_way`); the schedule is then simulated with the planned times. What a stage takes beyond the
guess corrects it, and cuts are proposed again, as long as that gets faster.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.capture.grids import grids
from memfit.capture.trace import Capture
from memfit.errors import BudgetError, CaptureError, SpecError
from memfit.pipelining.costs import call_costs
from memfit.pipelining.cuts import Cut, find_cuts
from memfit.pipelining.engine import make_schedule
from memfit.pipelining.forward_graph import ForwardGraph
from memfit.pipelining.question import LINK_BYTES_PER_SECOND, POLICIES, Found, Question, StagePlan
from memfit.pipelining.stage_steps import capture_stage, deferring, state_bytes
from memfit.pipelining.stages import Stage, cut_into_stages
from memfit.planner.balance import CutPlace, Demand, balance, demands, guessed_seconds
from memfit.planner.schedule import (
    Schedule,
    device_peaks,
    most_under_way,
    simulate_schedule,
)
from memfit.planner.under_way import PlannedStage, Traffic, plan_always, plan_never, plan_stage
from memfit.step.codec import graph_digest
from memfit.step.graph import StepGraph
from memfit.units import format_bytes

__all__ = ["plan_cuts", "search"]

log = logging.getLogger(__name__)

_TRIED = ("1f1b", "interleaved-1f1b", "zero-bubble")
"""By `"auto"`; the first takes the least memory, and any number of micro-batches."""

_ROUNDS = 3
_HALVINGS = 4
_SHORT_SECONDS = 0.5
"""A search that only tells whether something fits takes no longer."""


def search(forward: ForwardGraph, leaves: Sequence[Any], question: Question, device: torch.device) -> Found:
    """Finds the fastest pipeline that keeps the budget of each device.

    Args:
        forward: the model and its loss, traced on one micro-batch.
        leaves: the inputs of that micro-batch.
        question: what is asked.
        device: on which stages are profiled.

    Raises:
        BudgetError: if none fits, with the least budget found to work.
        SpecError: if the question makes no sense.
    """
    searcher = _Searcher(forward, leaves, question, device)
    names = _schedules(question)
    best: Found | None = None
    failure: BudgetError | None = None
    for name in names:
        schedule = make_schedule(name, question.num_devices, question.num_microbatches)
        try:
            found = searcher.best_of(schedule)
        except SpecError:
            if len(names) == 1:
                raise
            continue
        except BudgetError as error:
            failure = error if failure is None or error.least_bytes < failure.least_bytes else failure
            continue
        if best is None or found.timeline.step_seconds < best.timeline.step_seconds:
            best = found
    if best is None and failure is None:
        raise SpecError(f"the model can be cut into {searcher.most_stages} stages at most")
    if best is None:
        assert failure is not None
        searcher.question = replace(question, search_seconds=min(question.search_seconds, _SHORT_SECONDS))
        enough, least_bytes = searcher.enough_stages(), searcher.least_budget(names[0])
        more = f"; it fits on {enough} devices" if enough else ""
        raise BudgetError(
            f"{failure}; {format_bytes(least_bytes)} a device ({least_bytes} bytes) work{more}",
            budget_bytes=question.budget_bytes or 0,
            least_bytes=least_bytes,
            binding=failure.binding,
        ) from failure
    return best


def _schedules(question: Question) -> list[str]:
    if question.policy not in POLICIES:
        raise SpecError(f"unknown checkpoint policy {question.policy!r}; there are {', '.join(POLICIES)}")
    if question.schedule != "auto":
        return [question.schedule]
    if question.num_devices == 1:
        return ["1f1b"]
    return [name for name in _TRIED if _can_run(name, question)]


def _can_run(name: str, question: Question) -> bool:
    """The engine's forms of some schedules do not take every number of micro-batches."""
    try:
        make_schedule(name, question.num_devices, question.num_microbatches)
    except SpecError:
        return False
    return True


def plan_cuts(
    forward: ForwardGraph,
    leaves: Sequence[Any],
    schedule: Schedule,
    cuts: Sequence[int],
    question: Question,
    device: torch.device,
) -> Found:
    """Plans the stages between given cuts, for micro-batches of another size say.

    Raises:
        BudgetError: if a stage does not fit.
        CaptureError: if the model cannot be cut there.
    """
    searcher = _Searcher(forward, leaves, question, device)
    of_position = {place.position: number for number, place in enumerate(searcher.places)}
    if not set(cuts) <= set(of_position):
        raise CaptureError(
            "the model computes something else for micro-batches of another size; choose a number of them that divides "
            "the batch"
        )
    try:
        return searcher.plan(schedule, [of_position[cut] for cut in cuts])
    except _DoesNotFit as error:
        raise error.cause from None


class _Searcher:
    def __init__(self, forward: ForwardGraph, leaves: Sequence[Any], question: Question, device: torch.device) -> None:
        self.forward = forward
        self.leaves = leaves
        self.question = question
        self.device = device
        self.cuts = find_cuts(forward)
        self.places = [
            CutPlace(position=0, nbytes=0),
            *(CutPlace(position=cut.position, nbytes=cut.nbytes) for cut in self.cuts),
            CutPlace(position=len(forward.calls), nbytes=0),
        ]
        self.captured: dict[tuple[int, ...], tuple[Capture, StepGraph]] = {}  # by ends, and a grid
        self.deferred: dict[tuple[int, ...], tuple[Capture, StepGraph]] = {}
        self.state_bytes = state_bytes(forward, question, device)
        self.planned: dict[tuple[Any, ...], tuple[PlannedStage, PlannedStage | None]] = {}

    @functools.cached_property
    def demand(self) -> Callable[[int, int], Demand]:
        """Between two places what a stage takes, reckoned from the step of the whole model; given cuts need none."""
        (whole,) = cut_into_stages(self.forward, [])
        capture, graph = capture_stage(whole, self.leaves, self.question, self.device)
        self.captured[0, len(self.places) - 1] = capture, graph
        return demands(call_costs(self.forward, capture, graph), self.places, self.state_bytes)

    @property
    def most_stages(self) -> int:
        """How many stages the model can be cut into."""
        return len(self.cuts) + 1

    def enough_stages(self) -> int | None:
        """The least number of devices, up to twice as many and two, on which 1F1B fits; None if none is found."""
        asked = self.question.num_devices
        for count in range(asked + 1, min(2 * asked + 2, self.most_stages) + 1):
            schedule = make_schedule("1f1b", count, self.question.num_microbatches)
            under_way = most_under_way(schedule)
            ones = [1.0] * count
            if self._propose(schedule, self._share(schedule), under_way, ones, ones) is None:
                continue
            try:
                self.best_of(schedule)
            except BudgetError:
                continue
            return count
        return None

    def least_budget(self, name: str) -> int:
        """About the least budget of a device with which a plan is found: bisected down from what takes no budget.

        A search finds again what it found, so the budget is told, not what its plan takes: with that much only, the
        search goes another way.
        """
        asked = self.question
        low = asked.budget_bytes or 0
        taken = self._taken_within(name, None)
        assert taken is not None
        high = taken
        while self._taken_within(name, high) is None:
            high += high // 8
        for _ in range(_HALVINGS if asked.policy == "auto" else 0):
            middle = (low + min(taken, high)) // 2
            found = self._taken_within(name, middle)
            if found is None:
                low = middle
            else:
                high, taken = middle, found
        self.question = asked
        return high

    def _taken_within(self, name: str, budget_bytes: int | None) -> int | None:
        """What the fullest device takes within a budget; None if nothing fits."""
        self.question = replace(self.question, budget_bytes=budget_bytes)
        schedule = make_schedule(name, self.question.num_devices, self.question.num_microbatches)
        try:
            return max(self.best_of(schedule).peak_bytes)
        except BudgetError:
            return None

    def best_of(self, schedule: Schedule) -> Found:
        """The fastest found for one schedule."""
        if schedule.num_stages > self.most_stages:
            raise SpecError(
                f"{schedule.num_stages} stages are asked for; the model can be cut into {self.most_stages} at most"
            )
        under_way = most_under_way(schedule)
        share = self._share(schedule)
        best: Found | None = None
        failure: BudgetError | None = None
        tried: set[tuple[int, ...]] = set()
        correction = [1.0] * schedule.num_stages
        pressure = [1.0] * schedule.num_stages
        for _ in range(_ROUNDS):
            places = self._propose(schedule, share, under_way, correction, pressure)
            if places is None:
                places = self._propose(schedule, None, under_way, correction, pressure)
            if places is None:
                raise SpecError(
                    f"the model cannot be cut into {schedule.num_stages} stages that each train something; take fewer"
                )
            if tuple(places) in tried:
                break
            tried.add(tuple(places))
            try:
                found = self.plan(schedule, places)
            except _DoesNotFit as error:
                failure = error.cause if failure is None or error.cause.least_bytes < failure.least_bytes else failure
                pressure[error.stage] *= 0.85  # reckon with less memory there, so that the stage gets smaller
                continue
            if best is None or found.timeline.step_seconds < best.timeline.step_seconds:
                best = found
            for index, plan in enumerate(found.stages):
                guess = self._guess(index, places, share, under_way)
                taken = plan.times.forward_seconds + plan.times.backward_seconds
                correction[index] = taken / guess if 0 < guess < float("inf") else 1.0
        if best is None:
            assert failure is not None
            raise failure
        return best

    def _guess(self, index: int, places: Sequence[int], budget: int | None, under_way: Sequence[int]) -> float:
        ends = [0, *places, len(self.places) - 1]
        return guessed_seconds(self.demand(ends[index], ends[index + 1]), budget, under_way[index])

    def _propose(
        self,
        schedule: Schedule,
        budget: int | None,
        under_way: Sequence[int],
        correction: Sequence[float],
        pressure: Sequence[float],
    ) -> list[int] | None:
        def seconds(stage: int, first: int, last: int) -> float:
            room = None if budget is None else int(budget * pressure[stage])
            return correction[stage] * guessed_seconds(self.demand(first, last), room, under_way[stage])

        return balance(
            schedule.num_stages,
            len(self.places),
            seconds,
            lambda place: 2 * self.places[place].nbytes / LINK_BYTES_PER_SECOND,
        )

    def _share(self, schedule: Schedule) -> int | None:
        """Of a device's budget, what each of its stages may take."""
        device_of = list(schedule.device_of().values())
        budget = self.question.budget_bytes
        return None if budget is None else budget // max(map(device_of.count, device_of))

    def plan(self, schedule: Schedule, places: Sequence[int]) -> Found:
        """Plans every stage between cuts at places.

        Raises:
            _DoesNotFit: if one of them does not.
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
        whole, budget, under_way = self.question.budget_bytes, self._share(schedule), most_under_way(schedule)
        device_of = schedule.device_of()
        taken = dict.fromkeys(device_of.values(), 0)
        for _ in range(_ROUNDS):
            plans: list[StagePlan] = []
            for stage in stages:
                room = None if budget is None else budget - taken[device_of[stage.index]]
                try:
                    plans.append(self._stage_plan(schedule, stage, places, room, under_way[stage.index]))
                except BudgetError as error:
                    raise _DoesNotFit(stage.index, error) from error
            peaks = self._device_peaks(schedule, plans)
            if whole is None or not schedule.splits_backward or max(peaks) <= whole:
                return plans
            for device, peak in enumerate(peaks):
                sharing = list(device_of.values()).count(device)
                taken[device] += max(0, peak - whole) // sharing
        assert whole is not None
        full = peaks.index(max(peaks))
        too_much = BudgetError(
            f"{schedule.name} takes {format_bytes(max(peaks))} of device {full}; '1f1b' may take less",
            budget_bytes=whole,
            least_bytes=max(peaks),
        )
        raise _DoesNotFit(max(stage for stage, device in device_of.items() if device == full), too_much)

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
        capture, graph = self.captured[ends]
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
        if key not in self.captured:
            self.captured[key] = capture_stage(stage, self.leaves, self.question, self.device, grid=key[2:])
        if not schedule.splits_backward:
            return self.captured[key]
        if key not in self.deferred:
            self.deferred[key] = deferring(*self.captured[key])
        return self.deferred[key]

    def _with_last(self, plan: StagePlan, schedule: Schedule, plans: Sequence[StagePlan]) -> StagePlan:
        """The plan with nothing run again for the last micro-batch, if that fits beside what the others keep."""
        budget = self.question.budget_bytes
        if self.question.policy != "auto" or budget is None or plan.planned.timeline.recompute_seconds == 0.0:
            return plan
        received = sum(c.nbytes for c in plan.stage.arriving)
        last = plan_never(plan.graph, None, Traffic(received_bytes=received, deferred=plan.capture.deferred))
        more = replace(plan, last=last)
        others = [more if one is plan else one for one in plans]
        fits = self._device_peaks(schedule, others)[schedule.device_of()[plan.stage.index]] <= budget
        return more if fits and schedule.num_microbatches > 1 else plan

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
        chosen: list[Cut] = [self.cuts[place - 1] for place in places]
        return cut_into_stages(self.forward, chosen)

    def _plan_stage(
        self, stage: Stage, capture: Capture, graph: StepGraph, budget: int | None, under_way: int
    ) -> StagePlan:
        received = sum(c.nbytes for c in stage.arriving)
        traffic = Traffic(under_way=under_way, received_bytes=received, deferred=capture.deferred)
        # Blocks of a model are alike, and so are stages made of as many of them.
        alike = graph_digest(graph), graph.static_bytes, traffic, budget
        if alike in self.planned:
            planned, last = self.planned[alike]
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
        self.planned[alike] = planned, last
        return made


@dataclass
class _DoesNotFit(Exception):
    """A stage for which no plan was found."""

    stage: int
    cause: BudgetError = field(repr=False)
