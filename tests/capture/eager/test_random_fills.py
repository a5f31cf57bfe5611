"""What is filled at random gets eager's numbers, and what lies otherwise gets eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.errors import CaptureError

_SEED = torch.Generator().manual_seed(0)
CHANNELS_LAST = torch.randn(4, 8, 6, 6, generator=_SEED).contiguous(memory_format=torch.channels_last)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli in place": lambda y: y * torch.empty_like(y).bernoulli_(0.3),
    "bernoulli in place over a slice": lambda y: y * torch.empty(4, 8, 9, 6)[:, :, :6].transpose(2, 3).bernoulli_(),
    "normal in place": lambda y: y * torch.empty_like(y).normal_(),
    "randomized relu": lambda y: F.rrelu(y, training=True),
    "group norm": lambda y: F.group_norm(y, 4).relu(),
    "channel shuffle": lambda y: F.channel_shuffle(y, 2).sin(),
    "logsigmoid": lambda y: F.logsigmoid(y),
    "pow": lambda y: 1.5**y,
    "division, rounded": lambda y: y * torch.div(y.detach(), 0.3, rounding_mode="floor"),
    "reflection": lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1],
    "batch norm, transposed": lambda y: F.batch_norm(y.flatten(2).transpose(1, 2), None, None, training=True).sin(),
}


class Between(nn.Module):
    """An op between two convolutions' worth of channels."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.op = nn.Conv2d(8, 8, 3, padding=1), [op]

    def forward(self, x: Tensor) -> Tensor:
        return self.op[0](self.first(x)) * 1.5


def _loss(output: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sin().mean()


@pytest.mark.parametrize("name", OPS)
def test_bits_are_eagers_in_channels_last(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Between(OPS[name])
    plain = copy.deepcopy(model)
    memfit.fit(model, (CHANNELS_LAST,), budget="1GiB", loss_fn=_loss, search_seconds=0.2)
    for one in (model, plain):
        torch.manual_seed(1)
        _loss(one(CHANNELS_LAST)).backward()
    for (path, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad), path


def test_a_fill_that_cannot_be_traced_is_refused() -> None:
    """A vectorised fill of contiguous memory draws otherwise than one with gaps."""
    model = Between(lambda y: y * torch.empty(4, 8, 6, 9)[..., :6].normal_())
    with pytest.raises(CaptureError, match="normal_ fills"):
        memfit.fit(model, (CHANNELS_LAST,), budget="1GiB", loss_fn=_loss)
