"""NumPy in a forward pass keeps its bits: in the graph where it is rounded in one way only, else plain code."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.capture.trace import capture_step

FUNCTIONS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "root of a number": (True, lambda x: x / np.sqrt(x.shape[-1])),
    "a number": (True, lambda x: x * np.float32(0.3)),
    "places": (True, lambda x: x[torch.as_tensor(np.arange(4))]),
    "exponential": (False, lambda x: x * float(np.exp(-0.3))),
    "mean": (False, lambda x: x + torch.from_numpy(x.detach().numpy().mean(keepdims=True))),
    "deviation behind a break": (False, lambda x: broken(x) + torch.from_numpy(x.detach().numpy().std(0))),
}
"""Whether the model with the function in its midst is one graph, and the function."""


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin()


class With(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.function(self.first(x))))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits(name: str) -> None:
    whole, function = FUNCTIONS[name]
    model, x = With(function), torch.randn(33, 16)
    twin = copy.deepcopy(model)
    assert (len(capture_step(model, (x,), {}, loss_fn=loss_of).pieces.pieces) == 1) is whole
    memfit.fit(model, (x,), budget="1MiB", loss_fn=loss_of)
    for each in (model, twin):
        loss_of(each(x)).backward()
    for planned, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert planned.grad is not None and plain.grad is not None
        assert torch.equal(planned.grad, plain.grad)
