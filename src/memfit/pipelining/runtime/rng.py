"""Random numbers of a micro-batch: the same for every schedule and every number of stages.

The state of the generator goes with a micro-batch from stage to stage, as one more tensor that crosses the cuts. So the
dropout masks of a micro-batch are those of the unpipelined model run on it. A single micro-batch starts from the
current state of the generator, and leaves the same state as the unpipelined step; several micro-batches start from
seeds drawn from the generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

__all__ = ["RandomStream"]


class RandomStream:
    """The random numbers of the steps of one process.

    Args:
        device: device whose generator is used.
        num_microbatches: number of micro-batches of a step.
    """

    def __init__(self, device: torch.device, num_microbatches: int) -> None:
        self.device = device
        self.num_microbatches = num_microbatches
        self.seeds: list[int] = []

    def begin(self) -> None:
        """Begins a step."""
        count = self.num_microbatches
        self.seeds = torch.randint(2**63 - 1, (count,)).tolist() if count > 1 else []

    def state(self) -> torch.Tensor:
        """The generator's state."""
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Sets the generator."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state.cpu(), self.device)
        else:
            torch.set_rng_state(state)

    def share(self, source: int, group: dist.ProcessGroup | None = None) -> None:
        """Sets the generator of every process to the state of one process: a step of one micro-batch draws from it.

        With several micro-batches, the first stage has drawn the seeds, so its generator is the source.
        """
        state = self.state().to(self.device)
        dist.broadcast(state, group=group, group_src=source if self.num_microbatches == 1 else 0)
        self.set_state(state)

    def seed(self, seed: int) -> None:
        """Seeds the generator."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    @contextlib.contextmanager
    def of(self, microbatch: int, arrived: torch.Tensor | None, *, last: bool) -> Iterator[list[torch.Tensor]]:
        """Runs a stage's forward pass with the random numbers of a micro-batch.

        Args:
            microbatch: its number.
            arrived: the state that arrived with the micro-batch; None at the first stage.
            last: whether this is the last stage.

        Yields:
            A list that holds the new state after the pass.
        """
        before = self.state()
        if arrived is not None:
            self.set_state(arrived)
        elif self.seeds:
            self.seed(self.seeds[microbatch])
        after: list[torch.Tensor] = []
        try:
            yield after
        finally:
            after.append(self.state().to(self.device))
            if self.seeds or not last:
                self.set_state(before)
