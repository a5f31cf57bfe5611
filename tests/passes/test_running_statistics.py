"""A batch normalisation is recomputed without its running statistics, unless the graph computes with them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.training_step import capture_step


def model(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)
    ).double()


NORMS = {
    "batch": (lambda: nn.BatchNorm2d(8), True),
    "instance": (lambda: nn.InstanceNorm2d(8), True),
    "instance, with running statistics": (lambda: nn.InstanceNorm2d(8, track_running_stats=True), False),
}


@pytest.mark.parametrize("name", NORMS)
def test_new_running_statistics_that_are_read_are_not_recomputed(name: str) -> None:
    make, recomputable = NORMS[name]
    torch.manual_seed(0)
    fitted, x = model(make()), torch.randn(4, 3, 20, 20, dtype=torch.float64)
    plain = copy.deepcopy(fitted)
    graph = capture_step(fitted, (x,), {}, loss_fn=lambda out: out.square().mean()).graph
    norms = [op for op in graph.ops if "batch_norm" in op.target and "backward" not in op.target]
    assert norms and all(op.recomputable is recomputable for op in norms)
    memfit.fit(fitted, (x,), budget="1GiB", loss_fn=lambda out: out.square().mean(), strategy="sequential:3")
    for module in (fitted, plain):
        module(x).square().mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(fitted.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(b, c) for b, c in zip(fitted.buffers(), plain.buffers(), strict=True))
