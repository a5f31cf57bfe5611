"""The graph with cuDNN's batch normalisation, on CPU: PyTorch's own kernels stand in for cuDNN's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.capture.training_step import capture_step
from memfit.compiler.request import Request
from memfit.ops.kernels import batch_norm
from memfit.passes import cudnn_batch_norm as cudnn_norm
from memfit.tools.verify import verify
from tests import models
from tests.runtime.cases import image_case

_aten = torch.ops.aten


def forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """As cuDNN's kernel does, over the running statistics, with a reserve that says whose it is."""
    result, mean, invstd = _aten.native_batch_norm.default(*args)
    return result, mean, invstd, torch.full((16,), len(mean), dtype=torch.uint8)


def backward(
    data: torch.Tensor,
    gradient: torch.Tensor,
    weight: Any,
    _: Any,
    __: Any,
    mean: Any,
    invstd: Any,
    eps: float,
    reserve: Any,
) -> tuple[torch.Tensor, ...]:
    assert (reserve == len(mean)).all() or not reserve.any()  # when it is profiled it is made up
    mask = [True, True, True]
    found: tuple[torch.Tensor, ...] = _aten.native_batch_norm_backward.default(
        gradient, data, weight, None, None, mean, invstd, True, eps, mask
    )
    return found


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(
        cudnn_batch_norm=SimpleNamespace(default=forward), cudnn_batch_norm_backward=SimpleNamespace(default=backward)
    )
    monkeypatch.setattr(batch_norm, "_aten", kernels)
    monkeypatch.setattr(cudnn_norm, "_takes_cudnn", lambda args: args[1] is not None)
    monkeypatch.setattr(cudnn_norm, "_reserve", lambda args: args[0].meta["val"].new_empty(16, dtype=torch.uint8))


class Norms(nn.Module):
    """Batch normalisations that update statistics, have none, are frozen, or run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(16), nn.BatchNorm2d(16, track_running_stats=False), nn.InstanceNorm2d(16, affine=True)]
        )
        self.frozen, self.twice = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm in self.norms:
            x = x + torch.relu(norm(x))
        x = self.twice(torch.sigmoid(self.twice(x)))
        return self.frozen(x).mean((2, 3))


@pytest.mark.smoke
@pytest.mark.parametrize("make", [functools.partial(models.Residual, blocks=1), Norms], ids=["residual", "norms"])
def test_gradients_and_running_statistics_have_the_bits_of_the_baseline_step(make: Callable[[], nn.Module]) -> None:
    model, args, kwargs, loss_fn = image_case(make(), 24)
    if isinstance(model, Norms):
        model.frozen.eval()
    capture = capture_step(model, args, kwargs, loss_fn=loss_fn)
    targets = {op.target for op in capture.graph.ops}
    assert {f"memfit.cudnn_batch_norm_{part}.default" for part in ("updating", "backward")} <= targets
    assert not any("_native_batch_norm_legit" in target for target in targets)
    with pytest.raises(memfit.BudgetError) as error:
        memfit.plan(model, args, kwargs, budget="1KiB", loss_fn=loss_fn, prove=False)
    result = verify(model, args, kwargs, Request(budget=error.value.least_bytes, loss_fn=loss_fn, prove=False))
    assert [(c.kind, c.name, c.max_difference) for c in result.checks if not c.equal] == []
    assert any("cudnn_batch_norm" in result.plan.planned.graph.ops[i].target for i in result.plan.program.recomputed())
    assert result.recomputes_executed == result.recomputes_planned


@pytest.mark.parametrize("training", [True, False])
def test_the_choice_can_be_asked_without_statistics(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch normalisation that tracks none, and instance normalisation."""
    monkeypatch.undo()
    with FakeTensorMode():
        data = torch.empty(4, 8, 6, 6, device="cuda")
        weight, bias = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
    chosen = cudnn_norm._takes_cudnn((data, weight, bias, None, None, training, 0.1, 1e-5))
    assert chosen is (training and torch.backends.cudnn.is_available())
