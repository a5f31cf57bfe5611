"""The step without memfit is predicted as eager autograd runs it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.sim.simulator import simulate_baseline

MODELS = {
    # Eager dropout on CPU keeps a float mask, the captured one a mask of single bytes.
    "dropout": (nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.1), nn.Linear(512, 512), nn.Dropout(0.1)), (256, 64)),
    # The eager backward pass of convolution and pooling holds the input as well.
    "convolution": (
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1)),
        (8, 3, 64, 64),
    ),
}


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_measured(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(shape)
    _, graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))

    def step() -> None:
        model.zero_grad()
        output = model(x)  # held to the end, as training loops do
        loss_fn(output).backward()
        model.zero_grad()

    measured = memfit.measure(step, repeats=1, start_bytes=graph.static_bytes).peak_bytes
    assert simulate_baseline(graph).peak_bytes == pytest.approx(measured, rel=0.01)
