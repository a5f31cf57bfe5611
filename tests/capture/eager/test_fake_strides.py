"""Fake results of kernels lie as the kernels' own do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import memfit
from memfit.capture.eager.fake_strides import strides_of_kernels
from memfit.compiler.recorded_ops import RecordedOps
from memfit.tools.training_loop import resident_bytes, step_peak, training_step

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


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda t: t.flatten(0, 1),
    "flat": lambda t: t.reshape(-1),
    "unflatten": lambda t: t.unflatten(0, (1, -1)),
    "ones between": lambda t: t.reshape([n for size in t.shape if size > 1 for n in (1, size)]),
    "ones behind": lambda t: torch.ops.aten._unsafe_view.default(t, [n for n in t.shape if n > 1] + [1, 1]),
    "select": lambda t: t.select(0, 0),
    "new axis": lambda t: t[:, None],
}


@settings(max_examples=60, deadline=None)
@given(
    shape=strategies.lists(strategies.sampled_from([1, 1, 2, 3]), min_size=2, max_size=4),
    order=strategies.randoms(use_true_random=False),
    stride=strategies.sampled_from([1, 6, 7, 36]),
)
def test_fake_views_have_torchs_strides_along_axes_of_one_element(shape: list[int], order: Any, stride: int) -> None:
    axes = order.sample(range(len(shape)), len(shape))
    lying = torch.rand(shape).permute(axes).contiguous()
    strides = [order.choice([s, stride]) if n == 1 else s for n, s in zip(lying.shape, lying.stride(), strict=True)]
    real = lying.as_strided(lying.shape, strides)
    mode = FakeTensorMode()
    with strides_of_kernels():
        for name, view in VIEWS.items():
            try:
                made = view(real)
            except RuntimeError:  # no view of such a layout
                continue
            with mode:
                found = view(mode.from_tensor(real))
            assert (found.shape, found.stride()) == (made.shape, made.stride()), name


class Windows(nn.Module):
    """Attention's windows over an image of one pixel: padded, cut into windows, and mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.again = nn.Conv2d(4, 32, 2, 2), nn.LayerNorm(32), nn.LayerNorm(32)
        self.mapped = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.again(self.norm(x)).view(2, 1, 1, 32)
        x = functional.pad(x, (0, 0, 0, 6, 0, 6)).reshape(2, 1, 7, 1, 7, 32).transpose(2, 3)
        return self.mapped(x)


def test_an_image_of_one_pixel_lies_as_it_does() -> None:
    """Where it is taken for channels last, the layer that follows maps and adds the bias in two ops, not in one."""
    torch.manual_seed(0)
    model, x = Windows(), torch.randn(2, 4, 2, 2)
    expected = model(x).detach()
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda output: output.square().sum())
    with RecordedOps() as recorded:
        assert torch.equal(model(x).detach(), expected)
    assert "aten.addmm.default" in {op.name for op in recorded.ops}


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


@pytest.mark.smoke
@pytest.mark.parametrize("turned", [False, True])
def test_statistics_of_mixed_precision_have_the_dtype_of_the_kernels(turned: bool) -> None:
    """With it the backward kernel can be asked, which refuses statistics of half precision."""
    data = torch.rand(4, 12, 8).bfloat16().transpose(1, 2) if turned else torch.rand(4, 8, 12).bfloat16()
    tensors = (data, *(torch.ones(8) for _ in range(4)))

    def step(data: Tensor, *of_channels: Tensor) -> list[Tensor]:
        out, mean, invstd = aten.native_batch_norm.default(data, *of_channels, True, 0.1, 1e-5)
        return [
            *(out, mean, invstd),
            *aten.native_batch_norm_backward.default(
                out, data, of_channels[0], *of_channels[2:], mean, invstd, True, 1e-5, [True] * 3
            ),
        ]

    mode = FakeTensorMode()
    with strides_of_kernels(), mode:
        found = step(*map(mode.from_tensor, tensors))
    made = step(*tensors)
    assert [(t.stride(), t.dtype) for t in found] == [(t.stride(), t.dtype) for t in made]


class _Overwritten(nn.Module):
    """Writes in place on every second row, so that the traced step calls `aten.copy` on a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.row = nn.Linear(64, 64), nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, 1::2] = self.row
        y[:, :3] *= 2
        return y.sin()


def test_a_copy_into_a_view_takes_the_memory_of_the_viewed_tensor() -> None:
    torch.manual_seed(0)
    model, x = _Overwritten(), torch.randn(8, 33, 64)
    plan = memfit.plan(model, (x,), budget="1GiB", loss_fn=lambda output: output.square().mean())
    assert plan.planned is not None
    graph = plan.planned.graph
    copies = [graph.storages[op.writes[0]].nbytes for op in graph.ops if op.target == "aten.copy.default"]
    assert copies and set(copies) == {x.numel() * 4}
    assert plan.measured_peak_bytes == plan.predicted.peak_bytes


@pytest.mark.parametrize("view", [lambda t: t[:, 1::2], lambda t: t.select(2, 5), lambda t: t[1:, :1].expand(3, 5, 6)])
def test_a_fake_copy_has_the_place_and_the_memory_of_the_kernels(view: Callable[[Tensor], Tensor]) -> None:
    whole = torch.randn(4, 5, 6)
    real = torch.ops.aten.copy.default(view(whole), torch.zeros(()))
    with strides_of_kernels(), FakeTensorMode() as mode:
        fake = torch.ops.aten.copy.default(view(mode.from_tensor(whole)), torch.zeros(()))
    told = [(t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in (real, fake)]
    assert told[0] == told[1]


@settings(deadline=None)
@given(
    shape=strategies.sampled_from([(6, 3, 8, 12), (3, 8, 12), (1, 2, 9, 7)]),
    kernel=strategies.sampled_from([[3, 3], [1, 1], [2, 3]]),
    stride=strategies.sampled_from([[1, 1], [2, 2], [3, 2]]),
    padding=strategies.sampled_from([[0, 0], [1, 1]]),
    transposed=strategies.booleans(),
)
def test_columns_and_what_is_folded_from_them_stay_in_the_memory_of_their_operands(
    shape: tuple[int, ...], kernel: list[int], stride: list[int], padding: list[int], transposed: bool
) -> None:
    columns, folded = torch.ops.aten.im2col.default, torch.ops.aten.col2im.default
    x = torch.randn(shape).mT.contiguous().mT if transposed else torch.randn(shape)
    real = columns(x, kernel, [1, 1], padding, stride)
    back = folded(real, list(x.shape[-2:]), kernel, [1, 1], padding, stride)
    with strides_of_kernels(), FakeTensorMode() as mode:
        for _ in range(2):  # fake tensors cache results
            fake = columns(mode.from_tensor(x), kernel, [1, 1], padding, stride)
            fake_back = folded(mode.from_tensor(real), list(x.shape[-2:]), kernel, [1, 1], padding, stride)
            for ours, kernels in ((fake, real), (fake_back, back)):
                told = [(t.shape, t.stride(), t.untyped_storage().nbytes()) for t in (ours, kernels)]
                assert told[0] == told[1]


class _Unfolded(nn.Module):
    """A convolution written as columns and a product; the gradient is folded from columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(3, 3, 1), nn.Parameter(torch.randn(7, 27))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ functional.unfold(self.first(x).relu(), 3, padding=1)


def test_a_step_with_folded_columns_takes_what_is_predicted() -> None:
    model, x = _Unfolded(), torch.randn(6, 3, 16, 24)
    plan = memfit.plan(model, (x,), budget="1GiB", loss_fn=lambda y: y.square().mean())
    assert plan.measured_peak_bytes == plan.predicted.peak_bytes
    found = memfit.estimate(model, (x,), loss_fn=lambda y: y.square().mean())
    step = training_step(model, model, (x,), {}, loss_fn=lambda y: y.square().mean(), hold_outputs=False)
    device = torch.device("cpu")
    measured = step_peak(step, device, lambda: resident_bytes(model, (x,), {}, None, device))
    assert found.peak == pytest.approx(measured, rel=0.001)
