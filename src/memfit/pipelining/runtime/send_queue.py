"""Messages that a process has sent to others, held until they have arrived.

A send takes as long as the receiver lets it, and what is sent stays in memory until then. Were it let go when it
happens to have arrived, the peak of a step would be another each time. So a message is held through the pass that
follows it, unless that one takes the answer, and before anything more is received or run the process waits until it has
arrived. What a device holds is then a matter of its schedule alone, and can be planned and proved.

Nobody waits for ever (`memfit.planner.pipeline.schedule.with_transfers`): a send and its receive are put into the
orders of two processes at one moment, and a process waits here only before what comes later in its own.

Known limits: never run with NCCL, where only the stream waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as engine

from memfit.pipelining.partition.boundary_layout import in_memory_order

__all__ = ["Outbox"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """Message in flight.

    Attributes:
        after: how many passes had begun when it was sent.
        answer: stage and micro-batch of the backward pass that takes the receiver's answer; None if there is none.
        tensors: what was sent.
        sends: what tells that it has arrived.
    """

    after: int
    answer: tuple[int, int] | None
    tensors: Sequence[torch.Tensor]
    sends: Sequence[dist.Work]

    def wait(self) -> None:
        """Waits until it has arrived."""
        for send in self.sends:
            send.wait()


class Outbox:
    """Messages of all stages of a process."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._passes = 0

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        answer: tuple[int, int] | None = None,
    ) -> None:
        """Sends dense tensors, as rows of memory.

        Args:
            tensors: what is sent.
            rank: to whom, by its number among all processes.
            group: the pipeline's processes; None for the default group.
            answer: stage and micro-batch of the backward pass for which the receiver sends something back.
        """
        sends = [dist.P2POp(dist.isend, in_memory_order(tensor), rank, group) for tensor in tensors]
        # As the engine posts receives: with NCCL both sides must take the same way.
        self._hold(tensors, engine._batch_p2p(sends), answer)

    def hold(self, tensors: Sequence[torch.Tensor], *, answer: tuple[int, int] | None = None) -> None:
        """Holds tensors as long as if they were sent."""
        self._hold(tensors, (), answer)

    def begin_pass(self) -> None:
        """Counts a pass, which finds only what was sent after the last one."""
        self.let_go()
        self._passes += 1

    def let_go(self, answer: tuple[int, int] | None = None) -> None:
        """Waits for what was sent before the last pass, and for that to which there is an answer now; then drops it."""
        left = []
        for message in self._messages:
            if message.after < self._passes or (answer is not None and message.answer == answer):
                message.wait()
            else:
                left.append(message)
        self._messages = left

    def finish(self) -> None:
        """Waits until everything has arrived."""
        for message in self._messages:
            message.wait()
        self.clear()

    def clear(self) -> None:
        """Forgets a step that did not end."""
        self._messages = []

    def _hold(
        self, tensors: Sequence[torch.Tensor], sends: Sequence[dist.Work], answer: tuple[int, int] | None
    ) -> None:
        self._messages.append(_Message(after=self._passes, answer=answer, tensors=tensors, sends=sends))
