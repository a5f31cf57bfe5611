"""Weight gradients of convolutions as products of matrices: the same sums, added where they belong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.ops.accumulation import Accumulate
from memfit.ops.kernels.conv_weight_gemm import add_weight_product
from memfit.profiling.cost_cache import open_cache
from memfit.profiling.profiler import profile_ops

_convolution_backward = torch.ops.aten.convolution_backward.default


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_added_is_the_gradient(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3), "dims")
    kernel_size = data.draw(st.sampled_from([1, 2, 3] if dims == 2 else [1]), "kernel")
    samples = data.draw(st.integers(0, 4), "n")
    ins, outs = data.draw(st.integers(1, 5), "ins"), data.draw(st.integers(1, 40), "outs")
    stride = data.draw(st.integers(1, 3), "stride")
    padding = data.draw(st.integers(0, 2), "padding") if kernel_size > 1 else 0
    dilation = data.draw(st.integers(1, 2), "dilation")
    size = data.draw(st.integers(1 + dilation * (kernel_size - 1), 8), "size")
    channels_last = dims == 2 and data.draw(st.booleans(), "channels last")
    x = torch.randn(samples, ins, *[size] * dims, dtype=torch.float64)
    weight = torch.randn(outs, ins, *[kernel_size] * dims, dtype=torch.float64)
    call: Any = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[dims - 1]
    gradient = torch.randn_like(call(x, weight, None, stride, padding, dilation))
    if channels_last:
        x, gradient = (t.to(memory_format=torch.channels_last) for t in (x, gradient))
    each = ([stride] * dims, [padding] * dims, [dilation] * dims, False, [0] * dims, 1)
    _, expected, _ = _convolution_backward(gradient, x, weight, None, *each, [False, True, False])
    before = torch.randn_like(weight)
    of_caller = torch.empty_like(weight.transpose(0, 1)).transpose(0, 1).copy_(before)  # laid out otherwise
    for total in (before.clone(), of_caller):
        add_weight_product(total, gradient, x, weight, None, *each, [False, True, False])
        torch.testing.assert_close(total, before + expected, rtol=1e-12, atol=1e-12)
    for total in (torch.full_like(weight, torch.nan), torch.full_like(of_caller, torch.nan)):
        add_weight_product(total, gradient, x, weight, None, *each, [False, True, False], beta=0)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def added(model: nn.Module, *shape: int) -> set[str]:
    """Parameters of which the gradient is never made by itself."""
    x = torch.randn(shape, dtype=next(model.parameters()).dtype, requires_grad=True)
    reading = (
        capture_step(model, (x,), {}, options=CaptureOptions(accumulate=Accumulate.AS_MADE))
        .subgraphs.subgraphs[0]
        .reading
    )
    names = [name for name, _ in model.named_parameters()]
    places = {storage: place for place, storage in enumerate(reading.gradient_of_input) if storage is not None}
    return {names[places[storage]] for storage in reading.added_as_made}


def test_pointwise_and_wide_convolutions_are_products() -> None:
    assert added(nn.Conv2d(8, 4, 1), 2, 8, 16, 16) == {"weight"}
    assert added(nn.Conv2d(8, 4, 1, stride=2, bias=False), 2, 8, 16, 16) == {"weight"}
    assert added(nn.Conv2d(4, 64, 3, padding=1), 2, 4, 4, 4) == {"weight"}  # 32 positions, 64 channels
    assert added(nn.Conv2d(4, 63, 3, padding=1), 2, 4, 4, 4) == set()
    assert added(nn.Conv2d(4, 4, 1, padding=1), 2, 4, 4, 4) == set()
    assert added(nn.Conv2d(4, 8, 1, groups=2), 2, 4, 4, 4) == set()
    assert added(nn.ConvTranspose2d(4, 8, 1), 2, 4, 4, 4) == set()
    assert added(nn.Conv2d(4, 8, 1).to(torch.bfloat16), 2, 4, 4, 4) == set()


def test_a_product_that_would_be_less_exact_is_none() -> None:
    """Kernels of convolutions have a precision of their own."""
    pointwise, matmul = nn.Conv2d(8, 4, 1), torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "bf16"):
            matmul.fp32_precision = precision
            assert added(pointwise, 2, 8, 16, 16) == set()
            assert added(nn.Conv2d(8, 4, 1).double(), 2, 8, 16, 16) == {"weight"}
    finally:
        matmul.fp32_precision = before
    assert added(pointwise, 2, 8, 16, 16) == {"weight"}


def test_in_tiles_a_convolution_stays_whole() -> None:
    """Slices of its weight gradient are added to each other, so nothing is gained by making it alone."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 4, 1))
    for grid, sums in (((), 2), ((2, 1, 1), 0)):  # a bias has a sum of its own where the weight has a product
        capture = capture_step(
            model, (torch.randn(4, 3, 8, 8),), {}, options=CaptureOptions(grid=grid, accumulate=Accumulate.AS_MADE)
        )
        assert [op.target for op in capture.graph.ops].count("aten.sum.dim_IntList") == sums, grid


def test_such_a_product_is_timed_as_it_runs() -> None:
    """Where images are small it takes a part of the time of the kernel for images, and has no gradient beside."""
    model = nn.Sequential(nn.Conv2d(512, 512, 1, bias=False), nn.Conv2d(512, 512, 3, padding=1, bias=False))
    seconds: dict[Accumulate, float] = {}
    for how in Accumulate:
        capture = capture_step(model, (torch.randn(2, 512, 2, 2),), {}, options=CaptureOptions(accumulate=how))
        graph = profile_ops(capture, torch.device("cpu"), open_cache(torch.device("cpu")))
        of_weights = [op for op in graph.ops if op.target.endswith("convolution_backward.default")]
        assert len(of_weights) == 2
        seconds[how] = sum(op.seconds for op in of_weights)
        written = [graph.storages[s].nbytes for op in of_weights for s in op.writes]
        assert (max(written) == 0) == (how is Accumulate.AS_MADE)
    assert seconds[Accumulate.AS_MADE] < seconds[Accumulate.WHOLE]


class Images(nn.Module):
    """Pointwise, wide and other convolutions, with biases and without, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 1)
        self.widen = nn.Conv2d(8, 64, 3, stride=4, padding=1)
        self.narrow = nn.Conv2d(64, 16, 1, bias=False)
        self.shrink = nn.Conv2d(16, 16, 1, stride=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        x = self.shrink(torch.tanh(self.narrow(torch.tanh(self.widen(x)))))
        made: torch.Tensor = self.head(x.mean((2, 3)))
        return made


@pytest.mark.smoke
def test_a_pipeline_of_convolutions_keeps_its_gradients_and_its_memory() -> None:
    """Its backward passes are split; `tests.ops.test_accumulation` has pipelines with whole ones."""
    torch.manual_seed(0)
    model = Images().double()
    x, y = torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.randint(5, (8,))
    loss_fn = nn.functional.cross_entropy
    for parameter in model.parameters():  # what is there before a step stays part of the sum
        parameter.grad = torch.ones_like(parameter)
    loss_fn(model(x), y).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    schedule = {"num_stages": 2, "num_microbatches": 4, "schedule": "zero-bubble"}
    pipe = memfit.pipeline(model, (x,), target=y, loss_fn=loss_fn, **schedule)
    for measured, predicted in zip(pipe.plan.measured_peak_bytes, pipe.plan.peak_bytes, strict=True):
        assert 0.98 * predicted <= measured <= predicted
    pipe.step(x, target=y)
    for wanted, parameter in zip(expected, model.parameters(), strict=True):
        assert wanted is not None and parameter.grad is not None
        assert (parameter.grad - wanted).abs().max() <= 1e-12 * wanted.abs().max()
