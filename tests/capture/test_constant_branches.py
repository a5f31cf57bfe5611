"""A branch on a tensor made from constants breaks no graph; any other does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.trace import capture_step


class Branching(nn.Module):
    def __init__(self, condition: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.condition = nn.Linear(8, 8), condition

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        if self.condition(x):
            return x * 2
        return x - 1


CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: (torch.arange(x.shape[1]).diff() == 1).all(),
    "a mask": lambda x: torch.ones(4, 4).tril().sum() > 100,
    "of two": lambda x: torch.tensor(3) > torch.full((), 2),
}
NOT_CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x.sum() > 0,
    "at random": lambda x: torch.rand(()) > 0.5,
    "written over": lambda x: torch.zeros(3).add_(x.detach().sum()).sum() > 0,
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constants_break_nothing(name: str) -> None:
    torch.manual_seed(0)
    model, x = Branching(CONSTANT[name]), torch.randn(3, 8)
    assert not capture_step(model, (x,), {}, loss_fn=torch.sum).pieces.breaks
    memfit.fit(model, (x,), budget="1GiB", loss_fn=torch.sum, search_seconds=0.1)  # proves which way is eager's


@pytest.mark.parametrize("name", NOT_CONSTANT)
def test_anything_else_breaks_the_graph(name: str) -> None:
    capture = capture_step(Branching(NOT_CONSTANT[name]), (torch.randn(3, 8),), {}, loss_fn=torch.sum)
    assert capture.pieces.breaks
