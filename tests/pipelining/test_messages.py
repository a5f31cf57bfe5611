"""What stages send each other: when room is made for it, and how long it is held."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as engine

from memfit.pipelining.runtime.engine import SCHEDULES, make_schedule, runtime
from memfit.pipelining.runtime.engine import _Placeholder as Placeholder
from memfit.pipelining.runtime.send_queue import Outbox
from memfit.pipelining.runtime.stage import EngineStage
from tests.pipelining.test_processes import case, make, measured_peak
from tests.processes import run


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_transfers_are_where_the_engine_would_put_them(name: str, devices: int, microbatches: int) -> None:
    schedule = make_schedule(name, devices, microbatches)
    of = schedule.device_of()
    stages: list[Any] = [Placeholder(stage, schedule.num_stages, devices) for stage in of if of[stage] == 0]
    ours = runtime(schedule, stages).pipeline_order_with_comms
    passes = {device: [engine._Action.from_str(str(a)) for a in order] for device, order in enumerate(schedule.orders)}
    assert ours == engine._add_send_recv(passes, stage_to_rank=of.__getitem__, num_stages=schedule.num_stages)


class Sent:
    """What tells that a message has arrived, and whether anybody asked."""

    def __init__(self) -> None:
        self.is_over = False

    def wait(self) -> None:
        self.is_over = True


def test_a_message_is_held_through_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sends: list[Sent] = []

    def post(asked: list[dist.P2POp]) -> list[Sent]:
        sends.extend(Sent() for _ in asked)
        return sends[-len(asked) :]

    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    monkeypatch.setattr(engine, "_batch_p2p", post)  # the engine's own, with which it receives
    outbox = Outbox()

    def send(answer: tuple[int, int] | None = None) -> Any:
        tensor = torch.ones(3)
        outbox.send([tensor], 1, None, answer=answer)
        return weakref.ref(tensor)

    outbox.begin_pass()
    first = send(answer=(0, 0))
    outbox.begin_pass()
    assert first() is not None and not sends[0].is_over
    second = send(answer=(0, 1))
    outbox.let_go()  # before anything is received
    assert first() is None and sends[0].is_over
    assert second() is not None and not sends[1].is_over
    outbox.let_go(answer=(0, 1))  # who answers has received it
    assert second() is None and sends[1].is_over
    third = send()
    outbox.finish()
    assert third() is None and sends[2].is_over


def takes_the_same_whoever_is_late(rank: int, world: int) -> None:
    run_stage = EngineStage.forward_one_chunk
    for schedule in ("gpipe", "1f1b"):
        EngineStage.forward_one_chunk = run_stage  # type: ignore[method-assign]
        made = case(torch.float64)
        optimizer = torch.optim.SGD(made.model.parameters())
        pipe = make(made, world, num_microbatches=4, schedule=schedule, optimizer=optimizer)
        peaks = []
        for late in (0, 1):

            def runs_late(self: EngineStage, *args: Any, late: int = late, **kwargs: Any) -> Any:
                time.sleep(0.05 * (rank == late))
                return run_stage(self, *args, **kwargs)

            EngineStage.forward_one_chunk = runs_late  # type: ignore[method-assign]
            peaks.append(measured_peak(pipe, made, optimizer))
        assert peaks[0] == peaks[1], schedule


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_a_peak_is_no_matter_of_who_is_late(tmp_path: Path) -> None:
    run(takes_the_same_whoever_is_late, 2, tmp_path)
