"""The mask of a ReLU before a max-pooling is applied to the pooled gradient, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.training_step import Capture, capture_step
from memfit.compiler.request import Request
from memfit.ir.graph import Phase
from memfit.tools.verify import verify

MODELS = {
    "apart": (nn.ReLU(), nn.MaxPool2d(2)),
    "overlapping": (nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)),
    "dilated": (nn.ReLU(), nn.MaxPool2d(2, stride=1, dilation=2)),
    "ceiling": (nn.ReLU(), nn.MaxPool2d(3, stride=2, ceil_mode=True)),
}


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def reads_relu_in_backward(capture: Capture) -> bool:
    made = {s for op in capture.graph.ops if op.target == "aten.relu.default" for s in op.writes}
    return any(made.intersection(op.reads) for op in capture.graph.ops if op.phase is Phase.BACKWARD)


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_without_the_relu(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *MODELS[name], nn.Conv2d(8, 8, 3, padding=1))
    x = torch.randn(4, 3, 17, 15).round(decimals=1)  # equal maxima too
    x[0, :, :5] = float("nan")
    assert not reads_relu_in_backward(capture_step(model, (x,), {}, loss_fn=loss_fn))
    x[0, :, :5] = 0.0
    result = verify(model, (x,), {}, Request(budget="16MiB", loss_fn=loss_fn, prove=False))
    assert not result.differing


class Skip(nn.Module):
    """The ReLU is read beside the pooling, so its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = self.first(x).relu()
        pooled = nn.functional.max_pool2d(active, 2)
        return self.second(pooled).mean() + active.square().mean()


def test_a_relu_that_is_read_elsewhere_keeps_its_mask() -> None:
    torch.manual_seed(0)
    model, x = Skip(), torch.randn(2, 3, 8, 8)
    assert reads_relu_in_backward(capture_step(model, (x,), {}, loss_fn=torch.sum))
    assert not verify(model, (x,), {}, Request(budget="16MiB", loss_fn=torch.sum, prove=False)).differing


class Returned(nn.Module):
    """The caller gets the pooled tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(self.first(x).relu(), 2)


def test_a_pooled_tensor_that_is_returned_may_be_overwritten() -> None:
    torch.manual_seed(0)
    model, x = Returned(), torch.randn(2, 3, 8, 8)
    gradients: list[torch.Tensor] = []
    for fitted in (False, True):
        if fitted:
            memfit.fit(model, (x,), budget="1GiB", loss_fn=loss_fn, prove=False)
        model.zero_grad()
        model(x).mul_(2).square().mean().backward()
        assert model.first.weight.grad is not None
        gradients.append(model.first.weight.grad.clone())
    assert torch.equal(*gradients)


def test_the_rule_for_values_that_are_no_numbers() -> None:
    """Masked before or after, from the same operands: maxima of NaN, of zeros, of negative zeros."""
    torch.manual_seed(0)
    aten = torch.ops.aten
    active = torch.randn(3, 4, 12, 12).relu()
    active[0, 0, :3], active[1, 1] = float("nan"), -0.0
    pooled, indices = aten.max_pool2d_with_indices(active, [3, 3], [2, 2], [1, 1])
    gradient = torch.randn_like(pooled)
    gradient[2] = -0.0
    rest = (active, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)
    after = aten.threshold_backward(aten.max_pool2d_with_indices_backward(gradient, *rest), active, 0)
    before = aten.max_pool2d_with_indices_backward(aten.threshold_backward(gradient, pooled, 0), *rest)
    assert torch.equal(after.view(torch.int32), before.view(torch.int32))
