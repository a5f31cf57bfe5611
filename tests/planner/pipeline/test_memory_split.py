"""Stages and micro-batches on one device keep its budget together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.planner.pipeline.device_memory import StageMemory, device_peaks
from memfit.planner.pipeline.memory_split import DoesNotFit, rooms, share_budget
from memfit.planner.pipeline.schedule import (
    Action,
    Pass,
    Schedule,
    gpipe,
    most_in_flight,
    on_one_device,
    one_forward_one_backward,
)
from memfit.planner.pipeline.stage_plan import PlannedStage, Traffic, plan_always, plan_never, plan_stage
from tests.planner.chains import stage as stage_of

_RECEIVED = 4


@dataclass(frozen=True, slots=True)
class Made:
    planned: PlannedStage


def traffic(schedule: Schedule, stage: int) -> Traffic:
    return Traffic(in_flight=most_in_flight(schedule)[stage], received_bytes=_RECEIVED)


def never(schedule: Schedule, graphs: list[StepGraph]) -> dict[int, StageMemory]:
    return {s: plan_never(graph, None, traffic(schedule, s)).memory for s, graph in enumerate(graphs)}


def always(schedule: Schedule, graphs: list[StepGraph]) -> dict[int, Made]:
    return {s: Made(plan_always(graph, None, traffic(schedule, s))) for s, graph in enumerate(graphs)}


def shared(
    schedule: Schedule,
    graphs: list[StepGraph],
    budget: int,
    *,
    tries: list[int] | None = None,
    any_will_do: bool = False,
) -> dict[int, Made]:
    def plan(stage: int, room: int, limit: int | None) -> Made:
        if tries is not None:
            tries.append(stage)
        asked = traffic(schedule, stage)
        return Made(plan_stage(graphs[stage], room, asked, saved_limit_bytes=limit, seconds=0.02))

    (order,) = schedule.orders
    least = {s: one.planned.saved_bytes for s, one in always(schedule, graphs).items()}
    return share_budget(order, never(schedule, graphs), least, budget, plan, any_will_do=any_will_do)


def peak(schedule: Schedule, made: dict[int, Made]) -> int:
    return device_peaks(schedule, lambda stage, microbatch: made[stage].planned.memory)[0]


def again(made: dict[int, Made]) -> float:
    return sum(one.planned.timeline.recompute_seconds for one in made.values())


@pytest.mark.parametrize(("in_flight", "share"), [(2, 0.9), (3, 0.7), (4, 0.55)])
def test_micro_batches_of_a_stage_share_its_budget(in_flight: int, share: float) -> None:
    schedule, graphs = gpipe(1, in_flight), [stage_of(12, received_bytes=_RECEIVED)]
    lean = always(schedule, graphs)
    budget = int(share * device_peaks(schedule, lambda stage, m: never(schedule, graphs)[stage])[0])
    made = shared(schedule, graphs, budget)
    assert peak(schedule, made) <= budget
    assert 0 < again(made)
    if peak(schedule, lean) <= budget:
        assert again(made) <= again(lean) + 1e-9


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 5), min_size=2, max_size=3),
    microbatches=st.integers(1, 3),
    share=st.floats(0.5, 1.1),
    fills=st.booleans(),
)
def test_stages_on_one_device_share_its_budget(
    lengths: list[int], microbatches: int, share: float, fills: bool
) -> None:
    of_many = (gpipe if fills else one_forward_one_backward)(len(lengths), microbatches)
    schedule = on_one_device(of_many)
    graphs = [stage_of(length, received_bytes=_RECEIVED) for length in lengths]
    most = device_peaks(schedule, lambda stage, m: never(schedule, graphs)[stage])[0]
    budget = int(share * most)
    try:
        made = shared(schedule, graphs, budget)
    except DoesNotFit as error:
        assert error.cause.least_bytes > budget
        assert share < 1
    else:
        assert peak(schedule, made) <= budget
        assert again(made) == 0 or share < 1


@pytest.mark.parametrize("share", [0.8, 0.6, 0.1])
def test_whether_any_plans_fit_takes_fewer_tries(share: float) -> None:
    schedule, graphs = gpipe(1, 3), [stage_of(12, received_bytes=_RECEIVED)]
    budget = int(share * device_peaks(schedule, lambda stage, m: never(schedule, graphs)[stage])[0])
    tries: dict[bool, list[int]] = {False: [], True: []}
    fit = {}
    for any_will_do, made in tries.items():
        try:
            fit[any_will_do] = peak(schedule, shared(schedule, graphs, budget, tries=made, any_will_do=any_will_do))
        except DoesNotFit:
            fit[any_will_do] = budget + 1
    assert (fit[True] <= budget) == (fit[False] <= budget) == (share > 0.5)
    assert len(tries[True]) <= min(2, len(tries[False]))


def test_a_stage_that_goes_back_at_once_leaves_its_room_to_itself() -> None:
    """Only stage 0 holds anything while another works: of one micro-batch all that the other keeps is its own."""
    schedule = on_one_device(one_forward_one_backward(2, 1))
    graphs = [stage_of(length, received_bytes=_RECEIVED) for length in (4, 12)]
    memory = never(schedule, graphs)
    left = rooms(schedule.orders[0], memory, 200)
    assert left == {0: 200, 1: 200 - memory[0].saved_bytes}
    budget = device_peaks(schedule, lambda stage, m: memory[stage])[0] - 20
    made = shared(schedule, graphs, budget)
    assert peak(schedule, made) <= budget
    assert again(made) <= 4


@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_cannot_be_made_again_is_kept_in_any_case(microbatches: int) -> None:
    """As statistics of batch normalisation are."""
    schedule = on_one_device(gpipe(2, microbatches))
    plain = stage_of(8, received_bytes=_RECEIVED)
    ops = [replace(op, recomputable=False) if place == 2 else op for place, op in enumerate(plain.ops)]
    graphs = [replace(plain, ops=tuple(ops))] * 2
    lean = always(schedule, graphs)
    assert min(one.planned.saved_bytes for one in lean.values()) > _RECEIVED
    budget = peak(schedule, lean)
    assert peak(schedule, shared(schedule, graphs, budget)) <= budget


def test_what_waits_between_the_parts_of_a_backward_pass_counts() -> None:
    order = tuple(Action(0, what, m) for m in range(2) for what in (Pass.FORWARD, Pass.INPUT))
    order += tuple(Action(0, Pass.WEIGHT, m) for m in range(2))
    memory = StageMemory(static_bytes=100, saved_bytes=10, forward_bytes=12, backward_bytes=15, deferred_bytes=8)
    assert rooms(order, {0: memory}, 200) == {0: 200 - 8}


def test_too_little_is_told_for_the_device() -> None:
    schedule = on_one_device(one_forward_one_backward(3, 2))
    with pytest.raises(DoesNotFit) as told:
        shared(schedule, [stage_of(4)] * 3, 30)
    assert isinstance(told.value.cause, BudgetError)
    assert told.value.cause.budget_bytes == 30 < told.value.cause.least_bytes
