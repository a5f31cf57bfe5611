"""Fake results of kernels lie as the kernels' own do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import memfit
from memfit.capture.kernel_strides import strides_of_kernels

aten = torch.ops.aten
UPRIGHT, TURNED = torch.rand(3, 6, 10) + 0.1, (torch.rand(3, 10, 6) + 0.1).transpose(1, 2)
CALLS: dict[str, tuple[Any, ...]] = {
    "hardtanh_backward": (aten.hardtanh_backward.default, -0.5, 0.5),
    "elu_backward": (lambda gradient, x: aten.elu_backward.default(gradient, 1.0, 1.0, 1.0, False, x),),
    "softplus_backward": (aten.softplus_backward.default, 1.0, 20.0),
    "hardswish_backward": (aten.hardswish_backward.default,),
    "hardsigmoid_backward": (aten.hardsigmoid_backward.default,),
    "logit_backward": (aten.logit_backward.default, 0.1),
    "xlogy": (aten.xlogy.Tensor,),
    "copysign": (aten.copysign.Tensor,),
}
LOSSES = {
    "mse": (aten.mse_loss_backward.default, 1),
    "smooth_l1": (aten.smooth_l1_loss_backward.default, 1, 1.0),
    "huber": (aten.huber_loss_backward.default, 1, 1.0),
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("call", "operands"),
    [
        *((CALLS[name], operands) for name in CALLS for operands in ((UPRIGHT, TURNED), (TURNED, UPRIGHT))),
        *((LOSSES[name], (torch.ones(()), TURNED, other)) for name in LOSSES for other in (UPRIGHT, TURNED)),
    ],
)
def test_fake_results_lie_as_kernels_results(call: tuple[Any, ...], operands: tuple[Tensor, ...]) -> None:
    op, *numbers = call
    mode = FakeTensorMode()

    def fake() -> Tensor:
        with mode:
            return op(*map(mode.from_tensor, operands), *numbers)

    told = fake()
    with strides_of_kernels():
        found = fake()
    made = op(*operands, *numbers)
    assert (found.shape, found.stride(), found.dtype) == (made.shape, made.stride(), made.dtype)
    assert fake().shape == told.shape


class Turned(nn.Module):
    """Layers along one axis, and an activation of what they give seen along another."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for across in self.across:
            x = x + functional.hardtanh(across(x.transpose(1, 2)).transpose(1, 2), -0.5, 0.5)
        return x


def test_a_gradient_is_not_written_over_what_lies_otherwise() -> None:
    """The bias's gradient is a sum, of which the order follows the layout."""
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(4, 6, 10)
    model(x).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda output: output.square().sum())
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
