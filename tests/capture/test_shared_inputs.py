"""Gradients of tensors that several pieces take, where one of them uses such a tensor several times."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit


class _Broken(nn.Module):
    """What a break and its pieces share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.linspace(0.3, 1.7, 16))


class _Intermediate(_Broken):
    """A result of the first piece that the second uses three times, and the third."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        middle = hidden * self.second(hidden) + hidden.sin()
        torch._dynamo.graph_break()
        return self.third(middle) * hidden.cos()


class _PlainCode(_Broken):
    """The same with plain code in the third place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        middle = hidden * self.second(hidden) + F.normalize(hidden)
        return _plainly(middle, hidden)


class _Weight(_Broken):
    """A parameter that both pieces use, the first three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.first(x * self.scale) * self.scale).tanh() * self.scale.cos()
        torch._dynamo.graph_break()
        return self.second(hidden) * self.scale


class _Returned(_Broken):
    """A tensor that the loss takes too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return hidden * self.second(hidden) + hidden.sin(), hidden


class _Repeated(_Broken):
    """One graph that runs several times and takes the same tensor each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        total = hidden
        for _ in range(3):
            torch._dynamo.graph_break()
            total = torch.tanh(total * hidden + self.second(hidden) * hidden)
        return total


@torch._dynamo.disable
def _plainly(middle: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return middle * hidden.cos() + hidden * hidden


def _loss(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if isinstance(output, tuple):
        return output[0].square().mean() + (output[1] * output[1].cos()).mean()
    return output.square().mean()


@pytest.mark.parametrize("kind", [_Intermediate, _PlainCode, _Weight, _Returned, _Repeated])
def test_gradients_have_the_bits_of_the_plain_step(kind: type[_Broken]) -> None:
    torch.manual_seed(0)
    plain = kind()
    x = torch.randn(64, 16)
    model = copy.deepcopy(plain)
    fitted = memfit.fit(model, (x,), budget="90%", loss_fn=_loss)
    for _ in range(2):
        _loss(plain(x)).backward()
        _loss(fitted(x)).backward()
    for (name, own), planned in zip(plain.named_parameters(), model.parameters(), strict=True):
        if own.grad is None:
            assert planned.grad is None, name
        else:
            assert planned.grad is not None and torch.equal(own.grad, planned.grad), name
