"""Schedules: what each device does, how long it takes, how much it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.planner.pipeline.schedule import (
    Action,
    Pass,
    Schedule,
    StageTimes,
    gpipe,
    most_in_flight,
    on_one_device,
    one_forward_one_backward,
    simulate_schedule,
    with_transfers,
)

KINDS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
shapes = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 6), st.integers(1, 9))
seconds = st.floats(0.01, 5.0)


@given(shapes, st.data())
def test_a_step_takes_no_less_than_its_busiest_device_and_its_longest_chain(shape, data) -> None:
    name, stages, microbatches = shape
    times = [StageTimes(forward_seconds=data.draw(seconds), backward_seconds=data.draw(seconds)) for _ in range(stages)]
    schedule = KINDS[name](stages, microbatches)
    timeline = simulate_schedule(schedule, times)
    busiest = max(microbatches * (t.forward_seconds + t.backward_seconds) for t in times)
    chain = sum(t.forward_seconds + t.backward_seconds for t in times)
    assert timeline.step_seconds >= max(busiest, chain) * (1 - 1e-9)
    assert 0 <= timeline.bubble < 1
    for action, start in timeline.starts.items():
        if action.what is Pass.FORWARD and action.stage:
            before = action._replace(stage=action.stage - 1)
            assert start >= timeline.starts[before] + times[before.stage].forward_seconds - 1e-9


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (3, 3), (4, 2)])
def test_equal_stages_wait_as_the_formula_says(stages: int, microbatches: int) -> None:
    times = [StageTimes(forward_seconds=1.0, backward_seconds=2.0)] * stages
    for kind in KINDS.values():
        timeline = simulate_schedule(kind(stages, microbatches), times)
        assert timeline.step_seconds == pytest.approx(3.0 * (microbatches + stages - 1))
        assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@given(st.integers(1, 6), st.integers(1, 9))
def test_how_many_are_in_flight(stages: int, microbatches: int) -> None:
    assert most_in_flight(gpipe(stages, microbatches)) == [microbatches] * stages
    expected = [min(microbatches, stages - stage) for stage in range(stages)]
    assert most_in_flight(one_forward_one_backward(stages, microbatches)) == expected


@given(shapes)
def test_one_device_does_the_same_work_in_an_order_that_works(shape) -> None:
    name, stages, microbatches = shape
    schedule = KINDS[name](stages, microbatches)
    times = [StageTimes(forward_seconds=1.0, backward_seconds=2.0)] * stages
    alone = on_one_device(schedule)
    (order,) = alone.orders
    assert sorted(order) == sorted(action for actions in schedule.orders for action in actions)
    assert simulate_schedule(alone, times).step_seconds == pytest.approx(3.0 * stages * microbatches)
    assert most_in_flight(alone) == most_in_flight(schedule)


def test_a_transfer_delays_the_next_stage() -> None:
    times = [StageTimes(forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.5)] * 2
    assert simulate_schedule(gpipe(2, 1), times).step_seconds == pytest.approx(6.0 + 2 * 0.5)


def test_devices_that_wait_for_each_other_are_told() -> None:
    order = (Action(0, Pass.BACKWARD, 0), Action(0, Pass.FORWARD, 0))
    stuck = Schedule(name="stuck", num_stages=1, num_microbatches=1, orders=(order,))
    with pytest.raises(ValueError, match="never gets to 0B0"):
        simulate_schedule(stuck, [StageTimes(forward_seconds=1.0, backward_seconds=1.0)])
    with pytest.raises(ValueError, match="never gets to 0B0"):
        with_transfers(stuck)


def zero_bubble_of_two() -> Schedule:
    """What PyTorch's engine makes of two stages and four micro-batches."""
    said = (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
    )
    orders = tuple(tuple(Action(int(a[0]), Pass(a[1]), int(a[2])) for a in order.split()) for order in said)
    return Schedule(name="zero-bubble", num_stages=2, num_microbatches=4, orders=orders)


def test_gradients_of_weights_fill_the_wait() -> None:
    times = [StageTimes(forward_seconds=1.0, backward_seconds=2.0, weight_seconds=1.0)] * 2
    schedule = zero_bubble_of_two()
    timeline = simulate_schedule(schedule, times)
    assert schedule.splits_backward and not gpipe(2, 4).splits_backward
    assert timeline.busy_seconds == (12.0, 12.0)
    assert most_in_flight(schedule) == [2, 2]
    whole = simulate_schedule(one_forward_one_backward(2, 4), times)
    assert 12.0 < timeline.step_seconds < whole.step_seconds == 15.0
    for stage in range(2):
        for m in range(4):
            of = {what: timeline.starts[Action(stage, what, m)] for what in (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT)}
            assert of[Pass.FORWARD] + 1.0 <= of[Pass.INPUT] and of[Pass.INPUT] + 1.0 <= of[Pass.WEIGHT]
    assert timeline.starts[Action(0, Pass.INPUT, 0)] >= timeline.starts[Action(1, Pass.INPUT, 0)] + 1.0
