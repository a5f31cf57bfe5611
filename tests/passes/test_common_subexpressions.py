"""What is computed twice from the same operands is computed once."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

import memfit
from memfit.capture.training_step import capture_step
from tests.models import Masked


def test_masks_are_built_once() -> None:
    capture = capture_step(Masked(), (torch.randn(2, 8, 32),), {}, loss_fn=torch.Tensor.sum)
    targets = Counter(op.target for op in capture.graph.ops)
    assert targets["aten.tril.default"] == 1
    assert targets["memfit.drawn.default"] == 3  # random: each is its own


def test_what_the_caller_holds_stays_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            x = self.linear(x)
            return (x * 2).view(-1), (x * 2).view(2, -1), (x * 2).sin()

    model = Twice()
    x = torch.randn(4, 8)
    plain = model(x)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda output: sum(o.sum() for o in output))
    first, second, third = model(x)
    first.detach().zero_()  # as the plain model allows, the others do not see it
    assert torch.equal(second, plain[1]) and torch.equal(third, plain[2])
