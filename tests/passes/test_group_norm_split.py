"""Normalisation by group and by instance, apart: the numbers of the native kernels, tile by tile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.ops.kernels.group_norm import (
    gradients_from_products,
    input_gradient,
    products_over_space,
    scale_and_shift,
    scaled_and_shifted,
    sums_of_space,
)
from memfit.tools.verify import verify
from tests.ops.tiling.test_rules import call_on
from tests.ops.tiling.test_rules import check as check_tiles

CHANNELS = 8


@pytest.mark.parametrize("groups", [1, 4, CHANNELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_halves_make_what_the_kernel_makes(dtype: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, CHANNELS, 7, 5, dtype=dtype) + 2).requires_grad_()
    norm = nn.GroupNorm(groups, CHANNELS).to(dtype)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    expected = norm(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    data, rows, tolerance = x.detach(), torch.arange(3).view(3, 1, 1, 1), 1e-12 if dtype is torch.float64 else 1e-5
    weight, bias = norm.weight.detach(), norm.bias.detach()
    # Two slices of samples, each of which adds to its own rows.
    parts = [(data[s], rows[s], gradient[s]) for s in (slice(2), slice(2, 3))]
    sums = sum(sums_of_space(d, r, 3) for d, r, _ in parts)
    scale, shift, moments = scale_and_shift(sums, weight, bias, groups, 35, norm.eps, dtype, 2)
    torch.testing.assert_close(scaled_and_shifted(data, scale, shift), expected, rtol=tolerance, atol=tolerance)
    products = sum(products_over_space(g, d, r, 3) for d, r, g in parts)
    of_weight, of_bias, slope, offset = gradients_from_products(products, moments, weight, 35, dtype, 2)
    torch.testing.assert_close(of_weight.sum(0), norm.weight.grad, rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(of_bias.sum(0), norm.bias.grad, rtol=tolerance, atol=10 * tolerance)
    found = input_gradient(gradient, data, scale, slope, offset)
    torch.testing.assert_close(found, x.grad, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (3,)])
def test_tiles_of_each_half(grid: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    data, gradient = torch.randn(2, 2, CHANNELS, 7, 5, dtype=torch.float64)
    numbers = torch.randn(3, 2, CHANNELS, 1, 1, dtype=torch.float64)
    rows = torch.arange(2).view(2, 1, 1, 1)
    check_tiles(*call_on(sums_of_space, {"data": data, "rows": rows}, 2), grid)
    check_tiles(*call_on(products_over_space, {"gradient": gradient, "data": data, "rows": rows}, 2), grid)
    check_tiles(*call_on(scaled_and_shifted, {"data": data, "scale": numbers[0], "shift": numbers[1]}), grid)
    names = {"gradient": gradient, "data": data, "scale": numbers[0], "slope": numbers[1], "offset": numbers[2]}
    check_tiles(*call_on(input_gradient, names), grid)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(4, CHANNELS),
    "group, no weights": lambda: nn.GroupNorm(2, CHANNELS, affine=False),
    "instance": lambda: nn.InstanceNorm2d(CHANNELS),
    "instance, weights": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
}


def model_with(*norms: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)]
    for norm in norms:
        layers += [norm(), nn.SiLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)]
    return nn.Sequential(*layers)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("names", "batch"), [(("group, no weights", "instance"), 1), (("group", "instance, weights"), 2)]
)
def test_a_step_in_tiles(names: tuple[str, ...], batch: int) -> None:
    model, x = model_with(*(NORMS[name] for name in names)), torch.randn(batch, 3, 64, 64)
    request = Request(budget=1, loss_fn=loss_fn, levers="all", search_seconds=0.1)
    capture, graph = capture_and_profile(model, (x,), {}, request, grid=(4, 4))
    large = [op for op in graph.ops if any(graph.storages[s].nbytes >= x.nbytes for s in op.writes)]
    assert [op.name for op in large if op.by_slices is None and op.target != "loss"] == []
    plain = sum(storage.nbytes for storage in graph.storages)
    plan = plan_captured(model, (x,), {}, capture, graph, request, int(0.4 * plain))
    assert {"memfit.sums_of_space.default", "memfit.products_over_space.default"} <= {
        graph.ops[o].target for o in plan.program.order()
    }
    result = verify(model, (x,), {}, plan, loss_fn=loss_fn)
    assert result.differing == () and result.fits
    assert result.recomputes_executed == result.recomputes_planned


def test_what_keeps_running_statistics_stays_whole() -> None:
    norm = lambda: nn.InstanceNorm2d(CHANNELS, track_running_stats=True)  # noqa: E731
    capture = capture_step(
        model_with(norm), (torch.randn(2, 3, 32, 32),), {}, loss_fn=loss_fn, options=CaptureOptions(grid=(2, 2))
    )
    assert not any(op.target == "memfit.sums_of_space.default" for op in capture.graph.ops)
