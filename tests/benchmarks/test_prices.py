from __future__ import annotations

import statistics

import pytest
import torch

from benchmarks.peers.prices import Executed, executed_seconds
from benchmarks.subject import Case, Subject

CPU = torch.device("cpu")
CNN = Case(spec="zoo:unet?width=4&depth=1", batch=2, shape=(3, 16, 16))


def test_the_baseline_step_costs_what_the_plan_says_it_costs():
    def ratio() -> float:
        subject = Subject.of(CNN, CPU)
        example = subject.example
        seconds = executed_seconds(example.model, example.args, {}, example.loss_fn, subject.costs, CPU)
        return seconds / subject.graph.plain_seconds

    # Beside the captured ops eager mode allocates the buffers of batch normalisation. Some layouts are measured later
    # than the plan's, when the machine may be busier.
    assert statistics.median(ratio() for _ in range(3)) == pytest.approx(1, rel=0.25)


def test_views_are_free_and_in_place_calls_count_as_what_they_stand_for():
    x = torch.randn(4, 4)
    with Executed() as executed:
        x.t().reshape(2, 8).relu_()
    assert [key.partition("(")[0] for key in executed.counts] == ["aten.clone.default", "aten.relu.default"]


def test_a_whole_convolution_backward_counts_as_its_two_halves():
    x, w = torch.randn(2, 2, 8, 8, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
    y = torch.conv2d(x, w)
    with Executed() as executed:
        y.backward(torch.ones_like(y))
    names = {key.partition("(")[0] for key in executed.counts}
    assert {"aten.convolution_backward.default", "memfit.convolution_input_gradient.default"} <= names
