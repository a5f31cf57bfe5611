"""What the model itself writes in place is known, forward ops only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.capture.training_step import capture_step
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.ir.graph import Phase

ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "module in place": (nn.ReLU(inplace=True), True),
    "module": (nn.ReLU(), False),
    "function, by position": (lambda x: F.relu(x, True), True),
    "function with an underscore": (torch.relu_, True),
    "function": (F.relu, False),
    "method": (lambda x: x.relu_(), True),
    "clipped": (nn.ReLU6(inplace=True), True),
    "sum": (lambda x: operator_iadd(x, x * 2), True),
    "new sum": (lambda x: x + x * 2, False),
}


def operator_iadd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y
    return x


class Activated(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(x)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_is_in_place(name: str) -> None:
    activation, expected = ACTIVATIONS[name]
    capture = capture_step(Activated(activation), (torch.randn(2, 3, 16, 16),), {}, loss_fn=torch.Tensor.sum)
    found = [joint for joint in capture.baseline_ops if joint is not None and joint.in_place_argument is not None]
    assert len(found) == expected
    assert not any(joint.phase is Phase.BACKWARD for joint in found)


def test_both_prices_are_measured() -> None:
    model, x = Activated(nn.ReLU(inplace=True)), torch.randn(2, 3, 64, 64)
    capture, graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=torch.Tensor.sum))
    assert graph.baseline is not None
    pairs = zip(graph.baseline.ops, capture.baseline_ops, strict=True)
    (whole,) = [op for op, joint in pairs if joint and joint.in_place_argument is not None]
    (op,) = [op for op in graph.ops if op.name == whole.name]
    assert op.in_place_seconds is not None and 0.0 < op.in_place_seconds <= op.seconds
    assert whole.seconds == op.in_place_seconds
