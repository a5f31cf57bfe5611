"""Finds the plan of a pipeline: its cuts, its schedule and the plan of each stage.

Cuts are proposed from times of calls and an estimate of the time for recomputation
(`memfit.planner.pipeline.partition`), and the stages between them are planned
(`memfit.pipelining.search.stage_planner`). The planned time of a stage corrects the estimate, and new cuts are
proposed, for a few rounds. If no plan fits, the search reports budgets and a number of devices that work.

A single micro-batch gets the bits of the unpipelined step: the search first tries cuts with which the gradients of a
parameter with many uses are added up in the order of that step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from memfit.errors import BudgetError, CaptureError, SpecError
from memfit.pipelining.config import LINK_BYTES_PER_SECOND, POLICIES, Found, Question
from memfit.pipelining.partition.call_costs import call_costs, often_used
from memfit.pipelining.partition.forward_graph import ForwardGraph
from memfit.pipelining.runtime.engine import make_schedule
from memfit.pipelining.search.device_budgets import budget_text, extended, scaled, shares
from memfit.pipelining.search.stage_planner import StagePlanner
from memfit.planner.pipeline.memory_split import DoesNotFit
from memfit.planner.pipeline.partition import CallCost, Demand, balance, demands, guessed_seconds
from memfit.planner.pipeline.partition_one_device import cuts_holding_least
from memfit.planner.pipeline.schedule import Schedule, most_in_flight, on_one_device

__all__ = ["asked_schedule", "plan_cuts", "search"]

log = logging.getLogger(__name__)

_TRIED = ("1f1b", "interleaved-1f1b", "zero-bubble")
"""Schedules that `"auto"` tries; the first takes the least memory, and runs any number of micro-batches."""

_ROUNDS = 3
_HALVINGS = 4
_SHORT_SECONDS = 0.5
"""Time limit of a search that only decides whether a plan fits."""


def search(forward: ForwardGraph, leaves: Sequence[Any], question: Question, device: torch.device) -> Found:
    """Finds the fastest pipeline within the budget of each device.

    Args:
        forward: the model and its loss, traced on one micro-batch.
        leaves: the inputs of that micro-batch.
        question: requirements for the pipeline.
        device: on which stages are profiled.

    Raises:
        BudgetError: if no plan fits, with the least budget that was found to work.
        SpecError: if the requirements are invalid.
    """
    searcher = _Searcher(forward, leaves, question, device)
    names = _schedules(question)
    best: Found | None = None
    failure: BudgetError | None = None
    senseless: SpecError | None = None
    planner = searcher.planner
    begin, patience = planner.effort.seconds, 0.0  # every other schedule gets as much work as the first one took
    for name in names:
        schedule = asked_schedule(name, question)
        planner.until_seconds = None if best is None else planner.effort.seconds + patience
        try:
            found = searcher.best_of(schedule)
        except SpecError as error:
            if len(names) == 1:
                raise
            senseless = senseless or error
            continue
        except BudgetError as error:
            failure = failure or error
            if best is None:
                break  # the others take more memory
            continue
        if best is None:
            patience = planner.effort.seconds - begin
        if best is None or searcher.rank(found) < searcher.rank(best):
            best = found
    if best is None and failure is None:
        raise senseless or SpecError(f"no schedule runs {question.num_microbatches} micro-batches; take another number")
    planner.until_seconds = None
    if best is not None and not searcher.adds_in_order(best.cuts):
        log.warning(
            "gradients of %s are added up in another order than unpipelined, so they are equal to rounding only; fewer "
            "stages or a larger budget may do",
            ", ".join(sorted(searcher.in_order)),
        )
    if best is None:
        assert failure is not None
        planner.question = replace(question, search_seconds=min(question.search_seconds, _SHORT_SECONDS))
        searcher.in_order, planner.any_will_do = frozenset(), True  # the question is now only what fits
        enough, least = searcher.enough_stages(), searcher.least_budgets(names[0])
        more = f"; it fits on {enough} devices" if enough else ""
        why = str(failure)  # this is about the memory of a stage, the least budgets are of devices
        if failure.binding and question.budget_bytes is not None:
            why = f"no plan fits {budget_text(question.budget_bytes)}; the most is taken by {failure.binding}"
        raise BudgetError(
            f"{why}; {budget_text(least)} ({', '.join(map(str, dict.fromkeys(least)))} bytes) work{more}",
            budget_bytes=max(question.budget_bytes or (0,)),
            least_bytes=max(least),
            binding=failure.binding,
        ) from failure
    return best


def _schedules(question: Question) -> list[str]:
    if question.policy not in POLICIES:
        raise SpecError(f"unknown checkpoint policy {question.policy!r}; there are {', '.join(POLICIES)}")
    if question.schedule != "auto":
        return [question.schedule]
    if question.num_devices == 1 or question.one_device:
        return ["1f1b"]
    return [name for name in _TRIED if _can_run(name, question)]


def _can_run(name: str, question: Question) -> bool:
    """Whether the engine's form of a schedule can run this number of micro-batches."""
    try:
        asked_schedule(name, question)
    except SpecError:
        return False
    return True


def asked_schedule(name: str, question: Question) -> Schedule:
    """The schedule with a name, for the devices of the question.

    Raises:
        SpecError: see `memfit.pipelining.runtime.engine.make_schedule`.
    """
    made = make_schedule(name, question.num_devices, question.num_microbatches)
    return on_one_device(made) if question.one_device else made


def plan_cuts(
    forward: ForwardGraph,
    leaves: Sequence[Any],
    schedule: Schedule,
    cuts: Sequence[int],
    question: Question,
    device: torch.device,
) -> Found:
    """Plans the stages between given cuts, for example for micro-batches of another size.

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
        return searcher.planner.plan(schedule, [of_position[cut] for cut in cuts])
    except DoesNotFit as error:
        raise error.cause from None


class _Searcher:
    def __init__(self, forward: ForwardGraph, leaves: Sequence[Any], question: Question, device: torch.device) -> None:
        self.forward = forward
        self.planner = StagePlanner(forward, leaves, question, device)
        self.places = self.planner.places
        self.in_order = often_used(forward) if question.num_microbatches == 1 else frozenset[str]()
        self._demands: dict[frozenset[str], Callable[[int, int], Demand]] = {}

    @functools.cached_property
    def costs(self) -> list[CallCost]:
        """Cost of each call, computed from the step of the whole model; not needed for given cuts."""
        return call_costs(self.forward, *self.planner.whole())

    @property
    def demand(self) -> Callable[[int, int], Demand]:
        """Function from two places to the time and memory of a stage between them."""
        names = self.in_order
        if names not in self._demands:
            self._demands[names] = demands(self.costs, self.places, self.planner.state_bytes, in_order=names)
        return self._demands[names]

    @property
    def most_stages(self) -> int:
        """The largest number of stages into which the model can be cut."""
        return len(self.places) - 1

    def adds_in_order(self, cuts: Sequence[int]) -> bool:
        """Whether a single micro-batch gets the bits of the unpipelined step with cuts at these positions."""
        if not self.in_order:
            return True
        of_position = {place.position: number for number, place in enumerate(self.places)}
        ends = [0, *(of_position[cut] for cut in cuts), self.most_stages]
        return all(self.demand(first, last).may_be_stage for first, last in pairwise(ends))

    def rank(self, found: Found) -> tuple[bool, float]:
        """Sort key that compares plans of several schedules: exactness first, then speed."""
        return not self.adds_in_order(found.cuts), found.timeline.step_seconds

    def enough_stages(self) -> int | None:
        """The least number of devices, up to twice the asked number plus two, on which 1F1B fits; None if none does."""
        asked = self.planner.question
        if asked.one_device:
            return None
        found = None
        for count in range(asked.num_devices + 1, min(2 * asked.num_devices + 2, self.most_stages) + 1):
            self.planner.question = replace(asked, budget_bytes=extended(asked.budget_bytes, count))
            schedule = make_schedule("1f1b", count, asked.num_microbatches)
            in_flight = most_in_flight(schedule)
            ones = [1.0] * count
            if self._propose(schedule, self._shares(schedule), in_flight, ones, ones) is None:
                continue
            try:
                self.best_of(schedule)
            except BudgetError:
                continue
            found = count
            break
        self.planner.question = asked
        return found

    def least_budgets(self, name: str) -> tuple[int, ...]:
        """Approximately the least budgets, in the asked proportion, that give a plan: bisected from a plan without one.

        The result is the budgets of a search, not the peaks of its plan: with the same budgets, the search finds the
        plan again; with the peaks as budgets, it takes another path.
        """
        asked = self.planner.question
        assert asked.budget_bytes is not None
        low, free = max(asked.budget_bytes), self._taken_within(name, None, asked.budget_bytes)
        assert free is not None
        high = taken = free
        while self._taken_within(name, scaled(asked.budget_bytes, high), asked.budget_bytes) is None:
            high += high // 8
        for _ in range(_HALVINGS if asked.policy == "auto" else 0):
            middle = (low + min(taken, high)) // 2
            found = self._taken_within(name, scaled(asked.budget_bytes, middle), asked.budget_bytes)
            if found is None:
                low = middle
            else:
                high, taken = middle, found
        self.planner.question = asked
        return scaled(asked.budget_bytes, high)

    def _taken_within(self, name: str, budgets: tuple[int, ...] | None, proportion: Sequence[int]) -> int | None:
        """The largest budget, of budgets in a proportion, that a plan within `budgets` takes; None if no plan fits."""
        self.planner.question = replace(self.planner.question, budget_bytes=budgets)
        schedule = asked_schedule(name, self.planner.question)
        try:
            peaks = self.best_of(schedule).peak_bytes
        except BudgetError:
            return None
        return max(-(-peak * max(proportion) // share) for peak, share in zip(peaks, proportion, strict=True))

    def best_of(self, schedule: Schedule) -> Found:
        """The fastest pipeline found for one schedule."""
        until, in_order = self.planner.until_seconds, self.in_order
        try:
            if in_order:
                with contextlib.suppress(BudgetError, SpecError):
                    return self._best_of(schedule)
                self.in_order = frozenset()
            return self._best_of(schedule)
        finally:
            self.planner.until_seconds, self.in_order = until, in_order

    def _best_of(self, schedule: Schedule) -> Found:
        if schedule.num_stages > self.most_stages:
            raise SpecError(
                f"{schedule.num_stages} stages are asked for; the model can be cut into {self.most_stages} at most, so "
                "take fewer devices"
            )
        in_flight = most_in_flight(schedule)
        rooms = self._shares(schedule)
        best: Found | None = None
        failure: BudgetError | None = None
        tried: set[tuple[int, ...]] = set()
        correction = [1.0] * schedule.num_stages
        pressure = [1.0] * schedule.num_stages
        begin = self.planner.effort.seconds
        for _ in range(_ROUNDS):
            # On one device: first the cuts with the least memory if everything is saved; after a failure, balanced
            # cuts.
            proposed = functools.partial(self._propose, schedule, evenly=failure is not None)
            places = proposed(rooms, in_flight, correction, pressure)
            if places is None:
                places = proposed([None] * len(rooms), in_flight, correction, pressure)
            if places is None:
                raise SpecError(
                    f"the model cannot be cut into {schedule.num_stages} stages that each train something; take fewer"
                )
            if tuple(places) in tried or (tried and self.planner.is_late()):
                break
            tried.add(tuple(places))
            try:
                found = self.planner.plan(schedule, places)
            except DoesNotFit as error:
                failure = error.cause if failure is None or error.cause.least_bytes < failure.least_bytes else failure
                pressure[error.stage] *= 0.85  # estimate with less memory there, so that the stage gets smaller
                continue
            if best is None and self.planner.until_seconds is None:
                # Other cuts get as much work as these took.
                self.planner.until_seconds = 2 * self.planner.effort.seconds - begin
            if best is None or found.timeline.step_seconds < best.timeline.step_seconds:
                best = found
            if self.planner.any_will_do:
                break
            for index, plan in enumerate(found.stages):
                guess = self._guess(index, places, rooms[index], in_flight)
                taken = plan.times.forward_seconds + plan.times.backward_seconds
                correction[index] = taken / guess if 0 < guess < float("inf") else 1.0
        if best is None:
            assert failure is not None
            raise failure
        return best

    def _guess(self, index: int, places: Sequence[int], budget: int | None, in_flight: Sequence[int]) -> float:
        ends = [0, *places, len(self.places) - 1]
        return guessed_seconds(self.demand(ends[index], ends[index + 1]), budget, in_flight[index])

    def _propose(
        self,
        schedule: Schedule,
        budgets: Sequence[int | None],
        in_flight: Sequence[int],
        correction: Sequence[float],
        pressure: Sequence[float],
        *,
        evenly: bool = False,
    ) -> list[int] | None:
        def seconds(stage: int, first: int, last: int) -> float:
            budget = budgets[stage]
            room = None if budget is None else int(budget * pressure[stage])
            return correction[stage] * guessed_seconds(self.demand(first, last), room, in_flight[stage])

        even = balance(schedule.num_stages, len(self.places), seconds, self._crossing_seconds)
        if even is None or evenly or not self.planner.question.one_device:
            return even
        return cuts_holding_least(schedule.orders[0], len(self.places), self.demand, even)

    def _crossing_seconds(self, place: int) -> float:
        return 2 * self.places[place].nbytes / LINK_BYTES_PER_SECOND

    def _shares(self, schedule: Schedule) -> list[int | None]:
        question = self.planner.question
        return shares(None if question.one_device else question.budget_bytes, schedule)
