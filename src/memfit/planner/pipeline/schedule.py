"""The order in which the devices of a pipeline work, and its cost.

A schedule lists for each device which stage it runs on which micro-batch, forward or backward. The schedule and the
times of the stages give the time of a step, the share of it in which devices wait (the bubble), and the number of
micro-batches in flight at each stage: forward done, backward not. That number decides how much memory a stage has for
each micro-batch.

Sources: GPipe (Huang et al. 2019) runs all micro-batches forward and then all backward; 1F1B (Narayanan et al. 2019,
2021) starts backward passes as soon as it can, so that a stage has no more micro-batches in flight than there are
stages from it to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Struct, structs

from memfit.ir.fields import MOST_ITEMS, Index, Name

__all__ = [
    "Action",
    "Pass",
    "Receive",
    "Schedule",
    "Send",
    "StageTimes",
    "Task",
    "Timeline",
    "gpipe",
    "most_in_flight",
    "on_one_device",
    "one_forward_one_backward",
    "simulate_schedule",
    "with_transfers",
]


class Pass(StrEnum):
    """Kind of pass that a device runs on a micro-batch; the letters are those of PyTorch's engine."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The part of the backward pass that the stage before waits for (`memfit.planner.pipeline.split_backward`)."""
    WEIGHT = "W"
    """The rest of the backward pass."""


class Action(NamedTuple):
    """One pass of a device: the stage, the kind of pass, and the micro-batch."""

    stage: Index
    what: Pass
    microbatch: Index

    def __str__(self) -> str:
        """The action as PyTorch's engine writes it, such as `2F0`."""
        return f"{self.stage}{self.what.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Transfer of the result of a pass to another device."""

    of: Action


@dataclass(frozen=True, slots=True)
class Receive:
    """Allocation of memory on a device for the tensors that one of its passes takes from another device."""

    of: Action


Task: TypeAlias = Action | Send | Receive
"""Task of a device: an action, a send or a receive."""


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The actions of each device, in order.

    Attributes:
        name: name by which users ask for the schedule.
        num_stages: number of stages.
        num_microbatches: number of parts into which the batch is cut.
        orders: for each device its actions, in order.
    """

    name: Name
    num_stages: Index
    num_microbatches: Index
    orders: Annotated[tuple[Annotated[tuple[Action, ...], MOST_ITEMS], ...], MOST_ITEMS]

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed later than gradients of inputs."""
        return any(action.what is Pass.WEIGHT for order in self.orders for action in order)

    def device_of(self) -> dict[int, int]:
        """For each stage the device that runs it."""
        return {action.stage: device for device, order in enumerate(self.orders) for action in order}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one micro-batch at one stage.

    Attributes:
        forward_seconds: time of the forward pass.
        backward_seconds: time of the backward pass, recomputation included.
        weight_seconds: the part of the backward time that no other stage waits for.
        transfer_seconds: time of a transfer from this stage to the next one, or back.
    """

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def of(self, what: Pass) -> float:
        """Time of one action, in seconds."""
        return {
            Pass.FORWARD: self.forward_seconds,
            Pass.BACKWARD: self.backward_seconds,
            Pass.INPUT: self.backward_seconds - self.weight_seconds,
            Pass.WEIGHT: self.weight_seconds,
        }[what]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        step_seconds: time from the first action to the end of the last.
        starts: for each action its start time.
        busy_seconds: for each device the time that it computes.
    """

    step_seconds: float
    starts: Mapping[Action, float]
    busy_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they wait."""
        if not self.step_seconds:
            return 0.0
        return 1.0 - sum(self.busy_seconds) / (self.step_seconds * len(self.busy_seconds))


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All micro-batches forward, then all backward, one stage per device.

    The last micro-batch goes backward first, so that its saved storages are freed soon; PyTorch's own GPipe begins with
    the first one.
    """
    batches = range(num_microbatches)
    orders = tuple(
        (*(Action(s, Pass.FORWARD, m) for m in batches), *(Action(s, Pass.BACKWARD, m) for m in reversed(batches)))
        for s in range(num_stages)
    )
    return Schedule(name="gpipe", num_stages=num_stages, num_microbatches=num_microbatches, orders=orders)


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: a stage runs ahead by one micro-batch for each stage from it to the end; one stage per device."""
    orders = []
    for stage in range(num_stages):
        ahead = min(num_microbatches, num_stages - stage)
        order = [Action(stage, Pass.FORWARD, m) for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(Action(stage, Pass.BACKWARD, m))
            if m + ahead < num_microbatches:
                order.append(Action(stage, Pass.FORWARD, m + ahead))
        orders.append(tuple(order))
    return Schedule(name="1f1b", num_stages=num_stages, num_microbatches=num_microbatches, orders=tuple(orders))


def most_in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most micro-batches that are in flight there at once."""
    now = [0] * schedule.num_stages
    most = [0] * schedule.num_stages
    for order in schedule.orders:
        for action in order:
            if action.what is Pass.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.what is not Pass.INPUT:
                now[action.stage] -= 1
    return most


def simulate_schedule(schedule: Schedule, times: Sequence[StageTimes]) -> Timeline:
    """Simulates a schedule with the times of its stages; transfers run in parallel with compute.

    Args:
        schedule: the schedule.
        times: times of each stage.

    Returns:
        The start of each action, and the time of the step.

    Raises:
        ValueError: if the devices wait for each other for ever.
    """
    ends: dict[Action, float] = {}
    starts: dict[Action, float] = {}
    clocks = [0.0] * len(schedule.orders)
    busy = [0.0] * len(schedule.orders)
    next_up = [0] * len(schedule.orders)
    device_of = schedule.device_of()
    waiting = True
    while waiting:
        waiting = False
        for device, order in enumerate(schedule.orders):
            while next_up[device] < len(order):
                action = order[next_up[device]]
                ready = _ready_seconds(action, schedule, times, ends, device_of)
                if ready is None:
                    break
                start = max(ready, clocks[device])
                seconds = times[action.stage].of(action.what)
                starts[action], ends[action] = start, start + seconds
                clocks[device] = start + seconds
                busy[device] += seconds
                next_up[device] += 1
                waiting = True
    stuck = [str(order[n]) for n, order in zip(next_up, schedule.orders, strict=True) if n < len(order)]
    if stuck:
        raise ValueError(f"the schedule {schedule.name!r} never gets to {', '.join(stuck)}")
    return Timeline(step_seconds=max(ends.values(), default=0.0), starts=starts, busy_seconds=tuple(busy))


def _ready_seconds(
    action: Action,
    schedule: Schedule,
    times: Sequence[StageTimes],
    ends: Mapping[Action, float],
    device_of: Mapping[int, int],
) -> float | None:
    """Time at which the input of an action is there; None if the action that makes it has not run yet."""
    before = _before(action, schedule)
    if before is None:
        return 0.0
    if before not in ends:
        return None
    far = device_of[before.stage] != device_of[action.stage]
    return ends[before] + (times[min(before.stage, action.stage)].transfer_seconds if far else 0.0)


def _before(action: Action, schedule: Schedule) -> Action | None:
    """Action whose result an action needs; None if it needs none."""
    stage, what, microbatch = action
    if what is Pass.FORWARD:
        return Action(stage - 1, Pass.FORWARD, microbatch) if stage else None
    if what is Pass.WEIGHT:
        return Action(stage, Pass.INPUT, microbatch)
    if stage == schedule.num_stages - 1:
        return Action(stage, Pass.FORWARD, microbatch)
    return Action(stage + 1, what, microbatch)


def with_transfers(schedule: Schedule) -> tuple[tuple[Task, ...], ...]:
    """Tasks of each device, in order, sends and receives included.

    Devices take turns. When a pass makes a result for another device, the send, and the receive on the other device,
    are listed at once. So some receives are listed a pass or two before their result is needed, and the result comes
    while other passes run. No device waits for ever, even if sends end only when the other side receives: every task
    that a device waits for was listed before the waiting task, in the order in which all tasks were listed (as in
    PyTorch's `_add_send_recv`).

    Raises:
        ValueError: if the devices wait for each other for ever.
    """
    device_of = schedule.device_of()
    passes = [action for order in schedule.orders for action in order if action.what is not Pass.WEIGHT]
    takers = {_before(action, schedule): action for action in passes}
    waiting = [list(reversed(order)) for order in schedule.orders]
    made: list[list[Task]] = [[] for _ in schedule.orders]
    done: set[Action | None] = {None}
    while any(waiting):
        ready = False
        for device, queue in enumerate(waiting):
            if not queue or _before(queue[-1], schedule) not in done:
                continue
            action = queue.pop()
            made[device].append(action)
            done.add(action)
            taker = takers.get(action)
            if taker is not None and device_of[taker.stage] != device:
                made[device].append(Send(action))
                made[device_of[taker.stage]].append(Receive(taker))
            ready = True
        if not ready:
            raise ValueError(
                f"the schedule {schedule.name!r} never gets to {', '.join(str(q[-1]) for q in waiting if q)}"
            )
    return tuple(map(tuple, made))


def on_one_device(schedule: Schedule) -> Schedule:
    """The same actions in one order for a single device, which holds as little as the order of each stage allows.

    Backward passes go first, then the forward pass of the latest stage.
    """
    waiting = [list(reversed(order)) for order in schedule.orders]
    order: list[Action] = []
    done: set[Action | None] = {None}
    while any(waiting):
        ready = [queue for queue in waiting if queue and _before(queue[-1], schedule) in done]
        queue = max(ready, key=lambda queue: (queue[-1].what is not Pass.FORWARD, queue[-1].stage))
        order.append(queue.pop())
        done.add(order[-1])
    return structs.replace(schedule, orders=(tuple(order),))
