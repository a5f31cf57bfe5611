"""A convolution's two gradients are made in one call where the budget leaves room, with the same bits and within it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memfit

_CONVOLUTIONS = 2


class Counting(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, *[12] * (_CONVOLUTIONS - 1)):
        layers += [nn.Conv2d(channels, 12, 3, padding=1, bias=len(layers) % 2 == 0), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))
    return model.train(), torch.randn(8, 3, 24, 24), torch.randint(5, (8,))


def plan(budget: int | str, *, steps: int = 1) -> tuple[int, memfit.Plan]:
    """How often a fitted model called the backward pass of a convolution in its last step, and its plan."""
    model, x, y = made()
    plain = copy.deepcopy(model)
    fitted = memfit.fit(model, (x,), budget=budget, loss_fn=lambda output: functional.cross_entropy(output, y))
    for _ in range(steps):
        functional.cross_entropy(plain(x), y).backward()
        loss = functional.cross_entropy(fitted(x), y)
        with Counting() as counting:
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    return counting.calls[torch.ops.aten.convolution_backward.default], memfit.plan_of(fitted)


@pytest.mark.smoke
def test_one_call_where_there_is_room_and_two_where_there_is_none() -> None:
    calls, ample = plan("1GiB", steps=2)
    assert calls == _CONVOLUTIONS
    with pytest.raises(memfit.BudgetError) as error:
        plan(1 << 10)
    least = error.value.least_bytes
    assert least < ample.predicted.peak_bytes
    calls, tight = plan(least)
    assert calls > _CONVOLUTIONS
    assert tight.measured_peak_bytes <= least
