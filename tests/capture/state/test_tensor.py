"""A tensor's memory, sizes, gradient and version come back; one that nobody wrote is left alone."""

from __future__ import annotations

import copy

import torch
from torch import nn

import memfit
from benchmarks.notices import notices
from memfit.capture.state.snapshot import preserved


def test_a_tensor_that_nobody_wrote_keeps_its_version_and_the_callers_graph() -> None:
    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    waiting = module(x).square().sum()  # the caller's own graph, in flight while planning
    memfit.fit(module, (x,), budget="1GiB", loss_fn=lambda output: output.square().sum(), search_seconds=0.1)
    waiting.backward()
    expected = copy.deepcopy(module)
    memfit.release(expected).zero_grad()
    expected(x).square().sum().backward()
    assert torch.equal(module.weight.grad, expected.weight.grad)


def test_data_that_was_put_elsewhere_comes_back() -> None:
    layer = nn.Linear(4, 4)
    weight, pointer = layer.weight.detach().clone(), layer.weight.data_ptr()
    with preserved(layer):
        layer.weight.data = torch.zeros(7, 4)
        layer.bias.requires_grad_(False)
    assert layer.weight.data_ptr() == pointer and torch.equal(layer.weight, weight) and layer.bias.requires_grad


def test_a_tensor_that_cannot_be_copied_is_watched_and_why_is_told() -> None:
    holder = nn.Module()
    holder.sparse = torch.eye(3).to_sparse()
    with notices() as told, preserved(holder):
        holder.sparse.mul_(2)
    assert "planning wrote to sparse, and cannot take it back: it is no dense tensor" in "".join(told)
