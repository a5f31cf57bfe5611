"""How the memory of a device is divided among its stages and their micro-batches.

Bytes that a stage saves of a micro-batch between its passes take room from all passes that run meanwhile: from the next
micro-batches of the stage, and from other stages on the same device. So a stage gets two numbers: the bytes that it may
save of each micro-batch, and the bytes that are left for the passes of one micro-batch:

    parameters of all + bytes held meanwhile + peak of one micro-batch beyond parameters <= budget

All stages of a device may save the same share of the bytes that they would save with nothing recomputed. The share is
varied, from the largest one that fits, and the fastest plans are taken. A stage whose backward pass follows its forward
pass at once holds nothing meanwhile, and has no limit. Bytes that wait between the parts of a backward pass are assumed
to shrink by the same share, and are known when a plan is made. Shares are compared by brief searches for plans; plans
for the best share are searched for as long as the caller asks.

Known limits: with one share for all stages, a stage whose results are expensive to recompute saves no larger share than
a stage with cheap results. Results that cannot be recomputed are estimated as saved, though with a tier they could be
swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from memfit.errors import BudgetError
from memfit.planner.pipeline.device_memory import StageMemory, beside_each, order_peak
from memfit.planner.pipeline.schedule import Action, Pass, Task
from memfit.planner.pipeline.stage_plan import PlannedStage

__all__ = ["DoesNotFit", "Planned", "rooms", "share_budget"]

_BETWEEN = (0.75, 0.5, 0.25)
"""Shares of the most that could be saved, tried in this order until the plans get slower."""

_FINER = 2
"""How often a share halfway between the best and the next larger one is tried."""

_STEPS = 20
"""Bisection steps to find the most that could be saved."""

_GOOD_ENOUGH = 0.02
"""Plans that recompute for less than this share of their time need no other share."""


@dataclass
class DoesNotFit(Exception):
    """A stage for which no plan was found."""

    stage: int
    cause: BudgetError = field(repr=False)


class Planned(Protocol):
    """Object that holds the plan of a stage."""

    @property
    def planned(self) -> PlannedStage:
        """The plan of a micro-batch."""


P = TypeVar("P", bound=Planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried(Generic[P]):
    """Plans of all stages.

    Attributes:
        plans: the plans, by stage.
        cost: bytes above the budget, if bytes that wait between parts of backward passes were estimated too low;
            seconds.
        is_good: whether next to nothing is recomputed.
    """

    plans: dict[int, P]
    cost: tuple[int, float]
    is_good: bool


def rooms(order: Sequence[Task], memory: Mapping[int, StageMemory], budget_bytes: int) -> dict[int, int]:
    """Bytes left for one micro-batch of each stage, its own parameters and its own saved bytes included.

    Args:
        order: tasks of the device, in order.
        memory: memory of its stages; the peaks of single passes do not count.
        budget_bytes: budget of the device, plus the bytes of parameters that several of its stages share: `memory`
            counts them for each stage.
    """
    left: dict[int, int] = {}
    static = sum(one.static_bytes for one in memory.values())
    for action, counted, beside in beside_each(order, lambda stage, microbatch: memory[stage]):
        own = memory[action.stage]
        elsewhere = own.saved_bytes - counted.saved_bytes
        room = budget_bytes - (static - own.static_bytes) - beside + elsewhere
        left[action.stage] = min(room, left.get(action.stage, room))
    return left


def share_budget(
    order: Sequence[Task],
    wanted: Mapping[int, StageMemory],
    least: Mapping[int, int],
    budget_bytes: int,
    plan: Callable[[int, int, int | None], P],
    *,
    brief: Callable[[int, int, int | None], P] | None = None,
    is_late: Callable[[], bool] = lambda: False,
    any_will_do: bool = False,
) -> dict[int, P]:
    """The fastest plans found with which the stages of a device together stay within its budget.

    Args:
        order: tasks of the device, in order.
        wanted: memory of its stages with nothing recomputed.
        least: bytes saved in any case: received tensors, and results that cannot be recomputed, such as statistics.
        budget_bytes: budget of the device, with bytes that stages have in common and that are counted twice.
        plan: plans a stage, given the bytes that a micro-batch may take, and those that may be saved of it if limited.
        brief: the same in less time, to compare shares; None for `plan`.
        is_late: whether there is time only for the necessary plans.
        any_will_do: whether the first plans that fit are as good as the fastest.

    Raises:
        DoesNotFit: if no plans do; its least budget is an upper estimate.
    """
    lasting = _lasting(order)
    most = _most_saved(order, wanted, least, budget_bytes, lasting)

    def tried(share: float, by: Callable[[int, int, int | None], P]) -> _Tried[P]:
        memory = {stage: _keeping(one, least[stage], share * most) for stage, one in wanted.items()}
        return _tried(order, _planned(order, memory, lasting, budget_bytes, by), budget_bytes)

    if not lasting:
        return tried(1.0, plan).plans
    try:
        found = _compared(lambda share: tried(share, brief or plan), is_late, any_will_do)
    except DoesNotFit:
        if brief is None or is_late():
            raise
        return _compared(lambda share: tried(share, plan), is_late, any_will_do)[1].plans
    share, best = found
    if brief is None or best.is_good or any_will_do:
        return best.plans
    try:
        return min(best, tried(share, plan), key=lambda one: one.cost).plans
    except DoesNotFit:
        return best.plans


def _compared(
    tried: Callable[[float], _Tried[P]], is_late: Callable[[], bool], any_will_do: bool
) -> tuple[float, _Tried[P]]:
    """The best share that was tried and its plans.

    Raises:
        DoesNotFit: if no share fits.
    """
    seen: list[float] = []
    fitting: dict[float, _Tried[P]] = {}
    failures: list[DoesNotFit] = []

    def fits(share: float) -> bool:
        seen.append(share)
        try:
            fitting[share] = tried(share)
        except DoesNotFit as error:
            failures.append(error)
            return False
        return True

    def found() -> tuple[float, _Tried[P]]:
        return min(fitting.items(), key=lambda one: one[1].cost)

    if fits(1.0) and fitting[1.0].is_good:
        return found()
    if not fitting and (is_late() or not fits(0.0)):
        raise min(failures, key=lambda error: error.cause.least_bytes)
    if any_will_do and found()[1].cost[0] == 0:
        return found()
    for share in _BETWEEN:
        best = found()[1]
        if is_late() or (fits(share) and (fitting[share].is_good or fitting[share].cost >= best.cost)):
            break
    for _ in range(_FINER):
        best_share, best = found()
        larger = [share for share in seen if share > best_share]
        if larger and not best.is_good and not is_late():
            fits((best_share + min(larger)) / 2)
    return found()


def _planned(
    order: Sequence[Task],
    memory: Mapping[int, StageMemory],
    lasting: Collection[int],
    budget_bytes: int,
    plan: Callable[[int, int, int | None], P],
) -> dict[int, P]:
    """Plans of stages that save no more than given; bytes that one stage leaves go to the stages after it."""
    memory = dict(memory)
    made = {}
    for stage in sorted(memory):
        room = rooms(order, memory, budget_bytes)[stage]
        limit = memory[stage].saved_bytes - memory[stage].taken_bytes if stage in lasting else None
        try:
            made[stage] = plan(stage, room, limit)
        except BudgetError as error:
            least = budget_bytes + error.least_bytes - room
            cause = BudgetError(str(error), budget_bytes=budget_bytes, least_bytes=least, binding=error.binding)
            raise DoesNotFit(stage, cause) from error
        memory[stage] = made[stage].planned.memory
    return made


def _keeping(memory: StageMemory, least_bytes: int, share: float) -> StageMemory:
    saved_bytes = least_bytes + int(share * max(0, memory.saved_bytes - least_bytes))
    handed_bytes = memory.handed_bytes if share == 1.0 else 0  # perhaps not among the saved bytes
    deferred_bytes = int(share * memory.deferred_bytes)
    return replace(memory, saved_bytes=saved_bytes, deferred_bytes=deferred_bytes, handed_bytes=handed_bytes)


def _most_saved(
    order: Sequence[Task],
    wanted: Mapping[int, StageMemory],
    least: Mapping[int, int],
    budget_bytes: int,
    lasting: Collection[int],
) -> float:
    """The largest share of the bytes that stages want to save for which there is room."""

    def fits(share: float) -> bool:
        memory = {stage: _keeping(one, least[stage], share) for stage, one in wanted.items()}
        left = rooms(order, memory, budget_bytes)
        return all(left[stage] >= memory[stage].static_bytes + memory[stage].saved_bytes for stage in lasting)

    low, high = 0.0, 1.0
    if fits(high):
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _lasting(order: Sequence[Task]) -> set[int]:
    """Stages that hold saved bytes while any other pass runs on the device."""
    found = set()
    begun: dict[tuple[int, int], int] = {}
    passes = (thing for thing in order if isinstance(thing, Action))
    for place, (stage, what, microbatch) in enumerate(passes):
        if what is not Pass.FORWARD and place > begun[stage, microbatch] + 1:
            found.add(stage)
        begun[stage, microbatch] = place
    return found


def _tried(order: Sequence[Task], made: Mapping[int, P], budget_bytes: int) -> _Tried[P]:
    peak_bytes = order_peak(order, lambda stage, microbatch: made[stage].planned.memory)
    timelines = [one.planned.timeline for one in made.values()]
    seconds = sum(timeline.step_seconds for timeline in timelines)
    over_bytes = max(0, peak_bytes - budget_bytes)
    again = sum(timeline.recompute_seconds for timeline in timelines)
    return _Tried(
        plans=dict(made), cost=(over_bytes, seconds), is_good=again < _GOOD_ENOUGH * seconds and not over_bytes
    )
