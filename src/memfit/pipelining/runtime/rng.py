"""Which random numbers a micro-batch gets: the same whatever the schedule, and however many stages there are.

The state of the generator travels with a micro-batch from stage to stage, as one more tensor that crosses the cuts. So
its dropout masks are those of the unpipelined model run on that micro-batch. A single micro-batch starts from the
generator as it is, and leaves it as the unpipelined step would; several start from seeds drawn from it.
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
        device: whose generator is used.
        num_microbatches: of a step.
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
        """Leaves the generator of every process as it is on one: a step of one micro-batch draws from it.

        With several, the first stage has drawn seeds, and its generator counts.
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
            arrived: the state that came with it; None at the first stage.
            last: whether this is the last stage.

        Yields:
            A list that holds the state afterwards, when it is over.
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
