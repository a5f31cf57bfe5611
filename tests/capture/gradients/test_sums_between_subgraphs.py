"""Gradients of several subgraphs are added up by autograd, in new memory where it may not write over one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.allocation_tracker import LiveBytes


@torch._dynamo.disable
def outside(x: Tensor) -> Tensor:
    return x


class Shared(nn.Module):
    """A parameter that two subgraphs use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = outside(self.first(x).tanh())
        return self.first(outside(self.second(hidden).tanh())).sin()


class Residual(nn.Module):
    """A result of the first subgraph that two others take, which save nothing."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 64)
        self.register_buffer("weight", torch.randn(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        other = outside(outside(hidden) * 2)
        return other @ self.weight + hidden @ self.weight


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def least_plan(model: nn.Module, x: Tensor) -> memfit.Plan:
    with pytest.raises(memfit.BudgetError) as refused:
        memfit.fit(copy.deepcopy(model), (x,), budget=1, loss_fn=loss)
    least = refused.value.least_bytes
    assert least is not None
    memfit.fit(model, (x,), budget=least, loss_fn=loss)
    return memfit.plan_of(model)


def test_a_sum_of_a_parameters_gradients_is_predicted() -> None:
    plan = least_plan(Shared(), torch.randn(8, 64))
    assert plan.measured_peak_bytes == plan.predicted.peak_bytes


@pytest.mark.parametrize("make", [Shared, Residual])
def test_the_budget_holds_where_a_mode_counts(make: Callable[[], nn.Module]) -> None:
    """Autograd then adds nothing in place."""
    model, x = make(), torch.randn(*((512, 4) if make is Residual else (8, 64)))
    plan = least_plan(model, x)
    for _ in range(2):
        model.zero_grad()
        with LiveBytes() as counter:
            loss(model(x)).backward()
    there = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + x.nbytes
    assert there + counter.peak <= plan.budget_bytes


def test_a_sum_takes_new_memory_in_the_graph() -> None:
    plan = least_plan(Residual(), torch.randn(512, 4))
    assert plan.planned is not None
    (added,) = [op for op in plan.planned.graph.ops if "add-gradients" in op.target]
    assert added.workspace_bytes == 512 * 64 * 4
