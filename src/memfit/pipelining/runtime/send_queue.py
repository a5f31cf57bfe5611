"""Messages that a process has sent to other processes, held until they have arrived.

The receiver decides how long a send takes, and the sent tensors stay in memory until it ends. If a message were freed
at the moment when it happens to arrive, the peak would differ from step to step. So a message is held through the pass
that follows it, unless this pass takes the answer to the message; before the process receives or runs anything more, it
waits until the message has arrived. The memory of a device then depends on its schedule alone, and can be planned and
proved.

There is no deadlock (`memfit.planner.pipeline.schedule.with_transfers`): a send and its receive are put into the orders
of two processes at one moment, and a process waits here only before later tasks of its own order.

Known limits: it has never been run with NCCL, where only the stream waits.
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
        after: number of passes that had begun when it was sent.
        answer: stage and micro-batch of the backward pass that takes the receiver's answer; None if there is none.
        tensors: the sent tensors.
        sends: requests to wait for until the message has arrived.
    """

    after: int
    answer: tuple[int, int] | None
    tensors: Sequence[torch.Tensor]
    sends: Sequence[dist.Work]

    def wait(self) -> None:
        """Waits until the message has arrived."""
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
            tensors: the tensors to send.
            rank: the receiver, by its global rank.
            group: the pipeline's processes; None for the default group.
            answer: stage and micro-batch of the backward pass that takes the receiver's answer.
        """
        sends = [dist.P2POp(dist.isend, in_memory_order(tensor), rank, group) for tensor in tensors]
        # Posted in the same way as the engine posts receives: NCCL requires this of both sides.
        self._hold(tensors, engine._batch_p2p(sends), answer)

    def hold(self, tensors: Sequence[torch.Tensor], *, answer: tuple[int, int] | None = None) -> None:
        """Holds tensors for as long as a send would hold them."""
        self._hold(tensors, (), answer)

    def begin_pass(self) -> None:
        """Counts a pass; at its start, only messages sent after the previous pass began are still held."""
        self.let_go()
        self._passes += 1

    def let_go(self, answer: tuple[int, int] | None = None) -> None:
        """Waits for messages sent before the last pass, and for the one that is answered now; then drops them."""
        left = []
        for message in self._messages:
            if message.after < self._passes or (answer is not None and message.answer == answer):
                message.wait()
            else:
                left.append(message)
        self._messages = left

    def finish(self) -> None:
        """Waits until all messages have arrived."""
        for message in self._messages:
            message.wait()
        self.clear()

    def clear(self) -> None:
        """Drops the messages of a step that did not end."""
        self._messages = []

    def _hold(
        self, tensors: Sequence[torch.Tensor], sends: Sequence[dist.Work], answer: tuple[int, int] | None
    ) -> None:
        self._messages.append(_Message(after=self._passes, answer=answer, tensors=tensors, sends=sends))
