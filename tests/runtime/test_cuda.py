"""What only a CUDA device can show: cuDNN's and cuBLAS's kernels, the caching allocator, tiles on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.training_step import capture_step
from memfit.compiler.request import Request
from memfit.profiling.library_workspace import library_bytes
from memfit.tools.verify import verify
from tests import models
from tests.runtime.cases import CASES, check_bits_and_budget, image_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        yield


@pytest.mark.parametrize("share", [0.7, 0.25])
@pytest.mark.parametrize("name", CASES)
def test_bits_and_budget(name: str, share: float) -> None:
    check_bits_and_budget(name, share, device="cuda", slack_bytes=4 << 20)  # up to 1 MiB behind a tensor


class Norms(nn.Module):
    """Batch normalisations of every kind, for which eager PyTorch takes one kernel or another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(16),
                nn.BatchNorm2d(16, affine=False),
                nn.BatchNorm2d(16, track_running_stats=False),
                nn.InstanceNorm2d(16, affine=True),
                nn.GroupNorm(4, 16),
            ]
        )
        self.frozen = nn.BatchNorm2d(16)
        self.flat = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm in self.norms:
            x = x + torch.relu(norm(x))
        return self.flat(self.frozen(x).mean((2, 3)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_batch_normalisation_has_the_bits_of_eager(dtype: torch.dtype | None, layout: torch.memory_format) -> None:
    with torch.device("cuda"):
        model, (x,), kwargs, loss_fn = image_case(Norms(), 48, batch=16)
    model.frozen.eval()
    model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        plain = memfit.plan(model, (x,), kwargs, budget="2GiB", loss_fn=loss_fn, prove=False).predicted.plain_peak_bytes
        result = verify(model, (x,), kwargs, Request(budget=int(plain * 0.8), loss_fn=loss_fn), loss_fn=loss_fn)
    assert [(c.kind, c.name, c.max_difference) for c in result.checks if not c.equal] == []
    assert result.fits and result.plan.program.recomputed()


@pytest.mark.parametrize("name", ["residual", "kernels", "unet", "resnet"])
@pytest.mark.parametrize("grid", ["1x1", "2x2", "2x3"])
def test_tiles_agree_up_to_rounding(name: str, grid: str) -> None:
    with torch.device("cuda"):
        model, args, kwargs, loss_fn = CASES[name]()
    request = Request(budget="8GiB", loss_fn=loss_fn, levers="all", strategy=f"tile:{grid}", prove=False)
    result = verify(model, args, kwargs, request, loss_fn=loss_fn)
    assert [(c.kind, c.name, c.max_difference) for c in result.differing] == []
    assert result.plan.is_tiled


def test_all_levers_fit_where_the_others_do_not() -> None:
    with torch.device("cuda"):
        model, args, kwargs, loss_fn = image_case(nn.Sequential(models.Residual(width=32, blocks=2)), 128, batch=8)
    with pytest.raises(memfit.BudgetError) as error:
        memfit.plan(model, args, kwargs, budget="1MiB", loss_fn=loss_fn)
    request = Request(budget=int(error.value.least_bytes * 0.9), loss_fn=loss_fn, levers="all", search_seconds=0.5)
    result = verify(model, args, kwargs, request, loss_fn=loss_fn)
    assert not result.differing and result.fits and result.plan.is_tiled


def test_the_budget_includes_what_cublas_keeps() -> None:
    with torch.device("cuda"):
        model, args, kwargs, loss_fn = CASES["frozen"]()
    graph = capture_step(model, args, kwargs, loss_fn=loss_fn).graph
    kept = library_bytes(graph, torch.device("cuda"))
    assert kept > 1 << 20
    plan = memfit.plan(model, args, kwargs, budget="1GiB", loss_fn=loss_fn)
    assert plan.measured_peak_bytes is not None and plan.measured_peak_bytes > kept
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.1)


def test_what_else_is_in_memory_does_not_count() -> None:
    with torch.device("cuda"):
        model, args, kwargs, loss_fn = CASES["residual"]()
        plain = memfit.plan(model, args, kwargs, budget="1GiB", loss_fn=loss_fn).measured_peak_bytes
        ballast = torch.empty(64 << 20, dtype=torch.uint8)
        again = memfit.plan(model, args, kwargs, budget="1GiB", loss_fn=loss_fn).measured_peak_bytes
    del ballast
    assert plain is not None and again == pytest.approx(plain, rel=0.01)
