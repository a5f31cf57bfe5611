"""What a device of a pipeline holds: what is in flight, what waits, and messages."""

from __future__ import annotations

from memfit.planner.pipeline.device_memory import StageMemory, beside_each, device_peaks
from memfit.planner.pipeline.schedule import Action, Pass, Schedule, gpipe, one_forward_one_backward, with_transfers
from tests.planner.pipeline.test_schedule import zero_bubble_of_two


def test_a_device_holds_what_is_in_flight() -> None:
    memory = StageMemory(static_bytes=100, saved_bytes=10, forward_bytes=12, backward_bytes=15, after_bytes=1)
    assert device_peaks(gpipe(1, 4), lambda stage, microbatch: memory) == [100 + 30 + 15]
    assert device_peaks(one_forward_one_backward(3, 4), lambda *_: memory) == [100 + 20 + 15, 100 + 10 + 15, 115]
    large = StageMemory(static_bytes=100, saved_bytes=10, forward_bytes=12, backward_bytes=15, after_bytes=999)
    assert device_peaks(gpipe(1, 4), lambda *_: large) == [1099]


def test_what_the_last_micro_batch_keeps_is_gone_first() -> None:
    def memory(stage: int, microbatch: int) -> StageMemory:
        saved = 50 if microbatch == 3 else 10
        return StageMemory(static_bytes=0, saved_bytes=saved, forward_bytes=saved, backward_bytes=saved + 5)

    assert device_peaks(gpipe(1, 4), memory) == [30 + 55]


def test_what_passes_between_stages_of_one_device_counts_once_and_while_it_waits() -> None:
    first = StageMemory(
        static_bytes=100, saved_bytes=10, forward_bytes=12, backward_bytes=15, handed_bytes=6, sent_bytes=8
    )
    second = StageMemory(static_bytes=200, saved_bytes=30, forward_bytes=32, backward_bytes=35, returned_bytes=4)
    in_turn = tuple(Action(s, what, 0) for what, s in ((Pass.FORWARD, 0), (Pass.FORWARD, 1)))
    back = tuple(Action(s, Pass.BACKWARD, m) for m in range(2) for s in (1, 0))
    both = (first, second)

    def peak(order: tuple[Action, ...], count: int) -> int:
        schedule = Schedule(name="one", num_stages=2, num_microbatches=count, orders=(order,))
        return device_peaks(schedule, lambda stage, microbatch: both[stage])[0]

    assert peak((*in_turn, *back[:2]), 1) == 300 + 10 + 35 - 6
    other = Action(0, Pass.FORWARD, 1)  # one waits for the second stage meanwhile, with the two bytes that are not kept
    assert peak((*in_turn, other, back[0], back[1], Action(1, Pass.FORWARD, 1), *back[2:]), 2) == 300 + 20 + 2 + 35 - 6


def test_what_waits_takes_memory() -> None:
    memory = StageMemory(
        static_bytes=100, saved_bytes=10, forward_bytes=12, backward_bytes=15, deferred_bytes=8, weight_bytes=9
    )
    # Device 0 has one other in flight at most; device 1 goes back again while one waits, and one is in flight.
    assert device_peaks(zero_bubble_of_two(), lambda stage, microbatch: memory) == [100 + 10 + 15, 100 + 8 + 15]


def test_messages_count_from_when_they_are_asked_for_until_they_have_arrived() -> None:
    """1F1B on two devices; the second makes room for the next forward pass before each backward pass."""
    first = StageMemory(
        static_bytes=0,
        saved_bytes=10,
        forward_bytes=12,
        backward_bytes=15,
        sent_bytes=4,
        handed_bytes=3,
        answer_bytes=4,
    )
    second = StageMemory(
        static_bytes=0, saved_bytes=20, forward_bytes=22, backward_bytes=25, received_bytes=4, returned_bytes=4
    )
    both = (first, second)
    orders = with_transfers(one_forward_one_backward(2, 3))

    def beside(device: int) -> list[tuple[str, int]]:
        return [(str(a), held) for a, _, held in beside_each(orders[device], lambda stage, microbatch: both[stage])]

    sent = 4 - 3  # the rest is kept anyway
    assert beside(0) == [
        ("0F0", 0),
        ("0F1", 10 + sent),
        ("0B0", 10 + sent),
        ("0F2", 10),
        ("0B1", 10 + sent),
        ("0B2", 0),
    ]
    early = 4  # what the next forward pass takes
    assert beside(1) == [("1F0", 0), ("1B0", early), ("1F1", 4), ("1B1", early), ("1F2", 4), ("1B2", 0)]
    alone = with_transfers(gpipe(2, 1))[0]
    assert [held for _, _, held in beside_each(alone, lambda *_: first)] == [0, 0]  # whose answer is there has arrived
