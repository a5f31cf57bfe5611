"""A list of a class of its own is no reason to break a graph where an op gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.dynamo.list_arguments import list_arguments
from memfit.capture.training_step import capture_step
from memfit.torch_compat.compiler import UserDefinedListVariable


class Axes(list[int]):
    """As Keras keeps the axes of a layer."""


class Reduced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.axes = Axes([1, 2])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden - torch.mean(hidden, self.axes, keepdim=True)).square()


def loss(output: Tensor) -> Tensor:
    return output.sum()


@pytest.mark.smoke
def test_an_op_takes_the_list() -> None:
    capture = capture_step(Reduced(), (torch.randn(2, 3, 4, 8),), {}, loss_fn=loss)
    assert len(capture.subgraphs.subgraphs) == 1


def test_calls_may_nest() -> None:
    with list_arguments(), list_arguments():
        pass
    with list_arguments():
        with list_arguments():
            pass
        assert "as_proxy" in vars(UserDefinedListVariable)
    assert "as_proxy" not in vars(UserDefinedListVariable)


def test_other_elements_are_planned_anew() -> None:
    torch.manual_seed(0)
    model, x = Reduced(), torch.randn(2, 3, 4, 8)

    def gradients() -> list[Any]:
        model.zero_grad()
        loss(model(x)).backward()
        return [p.grad for p in model.parameters()]

    plain = [gradients()]
    model.axes[1] = 0
    plain.append(gradients())
    model.axes[1] = 2
    memfit.fit(model, (x,), budget="1MiB", loss_fn=loss, search_seconds=0.1)
    assert all(map(torch.equal, gradients(), plain[0]))
    model.axes[1] = 0
    assert all(map(torch.equal, gradients(), plain[1]))
    assert not all(map(torch.equal, plain[0], plain[1]))
