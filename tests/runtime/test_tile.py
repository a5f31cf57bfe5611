"""With the lever `tile` gradients are those of the baseline step up to rounding, in less memory than without it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture.loss.reading import backward_of
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.ir.graph import Phase
from memfit.ir.instructions import Compute, computes_in
from memfit.ir.program import program_of
from memfit.ops.batching.slices import Slice, in_slices
from memfit.ops.kernels.batch_norm import input_gradient_from_sums, input_gradient_over_data
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.planner.finalize.variant_selection import leanest
from memfit.planner.search.checkpoints import checkpoints
from memfit.planner.search.lazy_recompute import tiled_order
from memfit.runtime.executable import compile_program
from memfit.sim.simulator import simulate_baseline
from memfit.sim.verifier import check
from memfit.tools.verify import verify
from memfit.zoo import build
from tests.runtime.test_fused_region import loss_fn, residual
from tests.short_nets import CONVNEXT, RESNET


def least_bytes(model: nn.Module, args: tuple[Any, ...], loss: Any) -> tuple[int, int]:
    """Without tiling and with it, both from one error."""
    with pytest.raises(memfit.BudgetError, match='levers="all", the same gradients up to rounding, fits') as caught:
        memfit.plan(model, args, budget=1, loss_fn=loss, search_seconds=1.0, prove=False)
    return caught.value.least_bytes, int(str(caught.value).rpartition("(")[2].partition(" bytes")[0])


def tiled_plan(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any, grid: tuple[int, ...] = (1, 1)
) -> memfit.Plan:
    """For a budget between the widest op and the baseline step."""
    request = Request(budget=1, loss_fn=loss, levers="all", search_seconds=0.5)
    capture, graph = capture_and_profile(model, args, kwargs, request, grid=grid)
    plain, wall = simulate_baseline(graph).peak_bytes, widest_op_bytes(graph)
    return plan_captured(model, args, kwargs, capture, graph, request, int(wall + 0.5 * (plain - wall)))


@pytest.mark.full_search
def test_less_memory_and_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, x = residual(1).to(memory_format=torch.channels_last), torch.randn(5, 3, 40, 40)
    bitwise, tiled = least_bytes(model, (x,), loss_fn)
    assert tiled < 0.95 * bitwise
    request = Request(budget=tiled, loss_fn=loss_fn, levers="all", search_seconds=0.1, prove=False)
    result = verify(model, (x,), {}, request, loss_fn=loss_fn)
    assert result.plan.is_tiled
    assert not result.differing
    assert any(not check.equal for check in result.checks)  # or nothing was summed in another order
    assert result.fits
    assert result.peak_bytes == pytest.approx(result.plan.predicted.peak_bytes, rel=0.03)
    assert result.recomputes_executed == result.recomputes_planned


def test_a_plan_file_of_a_tiled_step(tmp_path: Path) -> None:
    grid = (2, 3)
    example = build("zoo:unet?width=8&depth=1", batch=2, shape=(3, 64, 64))
    model, args, loss = example.model, tuple(example.args), example.loss_fn
    plan = tiled_plan(model, args, example.kwargs, loss, grid)
    assert any(i.sliced for i in computes_in(plan.program.instructions))
    assert plan.is_tiled and "slice by slice" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = memfit.Plan.load(tmp_path / "plan.json")
    assert loaded.grid == grid
    result = verify(model, args, example.kwargs, loaded, loss_fn=loss)
    assert not result.differing
    assert result.rounded  # or nothing was summed in another order
    assert result.fits
    assert result.recomputes_executed == result.recomputes_planned


@pytest.mark.full_search
def test_one_large_image_runs_in_tiles() -> None:
    torch.manual_seed(0)
    convolutions = [nn.Sequential(nn.Conv2d(n, m, 3, padding=1), nn.ReLU()) for n, m in ((3, 8), (8, 8), (8, 8))]
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, 2), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(2, 3, 256, 256)[:1]  # of a batch that is there anyway
    model(x)
    bitwise, tiled = least_bytes(model, (x,), loss_fn)
    assert tiled < 0.7 * bitwise
    request = Request(budget=tiled, loss_fn=loss_fn, levers="all", search_seconds=0.1, prove=False)
    result = verify(model, (x,), {}, request)
    assert max(result.plan.grid) > 1
    assert not result.differing
    assert result.fits
    # Tiles of a few rows are uneven. The copy of the input that `verify` makes has no second image.
    assert result.peak_bytes + x.nbytes > 0.85 * result.plan.predicted.peak_bytes


class Resized(nn.Module):
    """Resizing by whole factors, to nearest pixels and between them, and by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(torch.relu(self.first(x)), scale_factor=2)
        x = nn.functional.interpolate(torch.tanh(x), scale_factor=(3, 1))
        x = nn.functional.interpolate(torch.sin(x), scale_factor=2, mode="bilinear")
        return self.last(nn.functional.interpolate(x, size=(50, 31)))


def test_resizing_in_tiles() -> None:
    torch.manual_seed(0)
    model, x = Resized().double(), torch.randn(2, 3, 24, 20, dtype=torch.float64)
    capture, graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn), grid=(3, 2))
    tiled = [op.target for op in graph.ops if op.by_slices is not None and op.by_slices.grid]
    assert sum("upsample_nearest2d" in target for target in tiled) == 4
    assert sum("upsample_bilinear2d" in target for target in tiled) == 2
    lean = leanest(graph)
    program = program_of(lean, tiled_order(lean, checkpoints(lean, 1)), in_place=False)
    plain = copy.deepcopy(model)
    loss_fn(compile_program(model, capture, program)(x)).backward()
    loss_fn(plain(x)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-14)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor, tuple[int, int]]:
    """Convolutions of all kinds with pooling, norms and activations between, on a batch in float64, and a grid."""
    torch.manual_seed(draw(st.integers(0, 9)))
    channels, layers = 3, list[nn.Module]()
    for _ in range(draw(st.integers(2, 3))):
        groups = draw(st.sampled_from([1, channels]))
        out = channels * draw(st.integers(1, 3))
        kernel, stride, dilation = draw(st.sampled_from([1, 2, 3, 5])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
        padding = draw(st.integers(0, 2)) if kernel > 1 else 0
        more = {"bias": draw(st.booleans()), "groups": groups, "dilation": dilation}
        kind = draw(st.sampled_from([nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d]))
        layers.append(kind(channels, out, kernel, stride, padding, **more))
        kinds = [
            *(nn.BatchNorm2d(out), nn.Identity(), nn.GroupNorm(1, out), nn.GroupNorm(3, out, affine=False)),
            *(nn.InstanceNorm2d(out), nn.InstanceNorm2d(out, affine=True)),
        ]
        layers += [draw(st.sampled_from(kinds)), draw(st.sampled_from([nn.ReLU(), nn.GELU(), nn.Hardswish()]))]
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(3, 1, 1)])))
        channels = out
    model = nn.Sequential(*layers).double()
    x = torch.randn(draw(st.integers(2, 5)), 3, 37, 37, dtype=torch.float64)
    try:
        copy.deepcopy(model)(x)
    except (RuntimeError, ValueError):  # a kernel is larger than what is left of the image
        reject()
    return model, x, draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (3, 2)]))


@given(stacks())
@settings(max_examples=5, derandomize=True)
def test_float64_gradients_of_any_stack(case: tuple[nn.Module, torch.Tensor, tuple[int, int]]) -> None:
    model, x, grid = case
    equal_to_rounding(model, (x,), {}, loss_fn, grid)


@pytest.mark.parametrize(
    ("spec", "batch", "shape", "grid"),
    [
        pytest.param(RESNET, 3, (3, 64, 64), (2, 2), id="resnet"),
        ("zoo:unet?width=8&depth=1", 3, (3, 32, 32), (1, 1)),
        pytest.param(CONVNEXT, 3, (3, 64, 64), (1, 1), id="convnext"),
        ("zoo:gpt?layers=2&width=32&heads=2", 5, (24,), (1, 1)),
        ("zoo:llama?layers=1&width=32&heads=4&kv_heads=2", 1, (24,), (1, 1)),
    ],
)
def test_float64_gradients_of_known_models(
    spec: str, batch: int, shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    example = build(spec, batch=batch, shape=shape)
    args = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in example.args]
    equal_to_rounding(example.model.double(), tuple(args), example.kwargs, example.loss_fn, grid)


def equal_to_rounding(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any, grid: tuple[int, ...]
) -> None:
    """As much as can be in slices, against the baseline step in float64."""
    capture, graph = capture_and_profile(model, args, kwargs, Request(budget=1, loss_fn=loss), grid=grid)
    lean = leanest(graph)
    program = program_of(lean, tiled_order(lean, checkpoints(lean, 1)), in_place=False)
    check(lean, program)
    assert any(i.sliced for i in computes_in(program.instructions))
    plain = copy.deepcopy(model)
    for call in (compile_program(model, capture, program), plain):
        torch.manual_seed(1)
        backward_of(call(*args, **kwargs), loss)
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert float((one.grad - other.grad).abs().max()) <= 1e-12 * scale
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_the_backward_pass_runs_in_slices_and_adds_up() -> None:
    torch.manual_seed(0)
    model, x = residual(1), torch.randn(5, 3, 40, 40)
    _, graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn), grid=(1, 1))
    lean = leanest(graph)
    program = program_of(lean, tiled_order(lean, checkpoints(lean, 1)))
    sliced = [graph.ops[i.op] for i in program.instructions if isinstance(i, Compute) and i.sliced]
    backward = {op.target for op in sliced if op.phase is Phase.BACKWARD}
    assert {
        "aten.convolution_backward.default",
        "memfit.convolution_input_gradient.default",
        "memfit.input_gradient_from_sums.default",
    } <= backward
    assert {"aten.native_batch_norm_backward.default", "aten.threshold_backward.default"} <= backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_batch_normalisation_from_its_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6).to(dtype)
    nn.init.uniform_(norm.weight)
    x = torch.randn(4, 6, 5, 7, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    norm(x).backward(gradient)
    mean, invstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), unbiased=False) + norm.eps).rsqrt()
    sums = norm.weight.grad, norm.bias.grad, x.numel() // 6
    with torch.no_grad():
        made = input_gradient_from_sums(gradient, x, norm.weight, mean, invstd, *sums)
        over = x.detach().clone()
        assert input_gradient_over_data(gradient, over, norm.weight, mean, invstd, *sums) is over
    assert torch.allclose(made, x.grad, rtol=0, atol=20 * torch.finfo(dtype).eps)
    assert torch.equal(over, made)


def test_sums_over_slices() -> None:
    how = Slice(
        run=lambda data: (data.sum(0), data * 2),
        sliced={0: 0},
        batch=5,
        samples=2,
        results=[torch.empty(3), torch.empty(5, 3)],
        axes=[0, 0],
        over=[None, None],
        sums={0},
    )
    data = torch.arange(15.0).view(5, 3)
    total, doubled = in_slices(how)(data)
    assert torch.equal(total, data.sum(0))
    assert torch.equal(doubled, data * 2)
