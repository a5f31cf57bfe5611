"""Memory of a pipeline device, pass by pass of its part of the schedule.

A stage holds the saved storages of each micro-batch in flight, and a device may have several stages. In addition there
are messages: memory for an incoming message is allocated when the engine asks for it, which may be a pass or two before
it is needed, and an outgoing message is held until it has arrived for certain (`memfit.pipelining.runtime.send_queue`).

Known limits: states of random generators that travel with micro-batches are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.planner.pipeline.schedule import Action, Pass, Receive, Schedule, Send, Task, with_transfers

__all__ = ["StageMemory", "beside_each", "device_peaks", "order_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of a stage with one micro-batch, in bytes.

    Attributes:
        static_bytes: bytes in use all the time.
        saved_bytes: bytes held between the passes of the micro-batch.
        forward_bytes: peak of its forward pass, beyond static bytes.
        backward_bytes: peak of its backward pass, or of the part that others wait for, saved bytes included.
        after_bytes: transient memory of the optimizer.
        deferred_bytes: bytes held between the two parts of its backward pass.
        weight_bytes: peak of the second part, held bytes included.
        handed_bytes: the part of the saved bytes that the next stage received and holds as well: one copy on one
            device.
        received_bytes: bytes from the stage before.
        taken_bytes: the part of the received bytes that is held until the backward pass; the rest only passes through.
        sent_bytes: bytes that the next stage receives.
        answer_bytes: bytes of gradients from the next stage.
        returned_bytes: bytes of gradients for the stage before.
    """

    static_bytes: int
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    after_bytes: int = 0
    deferred_bytes: int = 0
    weight_bytes: int = 0
    handed_bytes: int = 0
    received_bytes: int = 0
    taken_bytes: int = 0
    sent_bytes: int = 0
    answer_bytes: int = 0
    returned_bytes: int = 0

    def without(self, counted_bytes: int) -> StageMemory:
        """The same without received bytes that are counted elsewhere until its backward pass ends."""
        return replace(
            self,
            saved_bytes=self.saved_bytes - counted_bytes,
            forward_bytes=self.forward_bytes - counted_bytes,
            backward_bytes=self.backward_bytes - counted_bytes,
        )


def device_peaks(
    schedule: Schedule,
    memory: Callable[[int, int], StageMemory],
    counted_twice: Callable[[frozenset[int]], int] = lambda stages: 0,
) -> list[int]:
    """The peak of each device.

    Args:
        schedule: the schedule.
        memory: gives the memory of a stage with a micro-batch.
        counted_twice: gives the bytes of parameters that several of the given stages have in common.

    Returns:
        Bytes for each device.
    """
    return [order_peak(order, memory) - counted_twice(frozenset(_stages(order))) for order in with_transfers(schedule)]


def order_peak(order: Sequence[Task], memory: Callable[[int, int], StageMemory]) -> int:
    """The peak of a device that runs its tasks in an order; see `device_peaks`."""
    peak = 0
    for action, here, beside in beside_each(order, memory):
        own = {Pass.FORWARD: here.forward_bytes, Pass.WEIGHT: here.weight_bytes}.get(action.what, here.backward_bytes)
        peak = max(peak, beside + own)
    each = [memory(stage, 0) for stage in _stages(order)]
    after = max((one.after_bytes for one in each), default=0)
    return sum(one.static_bytes for one in each) + max(peak, after)


def beside_each(
    order: Sequence[Task], memory: Callable[[int, int], StageMemory]
) -> Iterator[tuple[Action, StageMemory, int]]:
    """For each pass of a device the memory of its stage, and the other bytes held then, without static bytes.

    If the next stage is on the same device, results wait there for the next stage and gradients wait for this one; and
    a tensor that a stage received may be the same tensor that the stage before saves. A message to another device is
    held through the next pass, unless that pass takes the answer to it.
    """
    stages = _stages(order)
    held = sent = 0
    early: dict[Action, int] = {}
    previous: Action | None = None
    for thing in order:
        if isinstance(thing, Receive):
            taker = memory(thing.of.stage, thing.of.microbatch)
            early[thing.of] = taker.received_bytes if thing.of.what is Pass.FORWARD else taker.answer_bytes
            continue
        if isinstance(thing, Send):
            continue
        stage, what, microbatch = action = thing
        here = memory(stage, microbatch)
        before = memory(stage - 1, microbatch) if stage - 1 in stages else None
        after = memory(stage + 1, microbatch) if stage + 1 in stages else None
        passing = here.received_bytes - here.taken_bytes
        counted = here if before is None else here.without(max(0, before.handed_bytes - passing))
        early.pop(action, None)  # the stage counts it from here on
        messages = sum(early.values()) + (0 if previous == (stage, Pass.FORWARD, microbatch) else sent)
        sent, previous = 0, action
        if what is Pass.FORWARD:
            held -= 0 if before is None else before.sent_bytes - before.handed_bytes
            yield action, counted, held + messages
            left = here.sent_bytes - here.handed_bytes
            held += counted.saved_bytes + (0 if after is None else left)
            sent = left if after is None else 0
        elif what is Pass.WEIGHT:
            held -= counted.deferred_bytes
            yield action, counted, held + messages
        else:
            held -= counted.saved_bytes + (0 if after is None else after.returned_bytes)
            yield action, counted, held + messages
            held += counted.deferred_bytes if what is Pass.INPUT else 0
            held += 0 if before is None else here.returned_bytes
            sent = here.returned_bytes if before is None else 0


def _stages(order: Sequence[Task]) -> set[int]:
    return {thing.stage for thing in order if isinstance(thing, Action)}
