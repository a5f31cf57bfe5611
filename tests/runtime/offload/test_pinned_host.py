"""Pinned memory of the host as a tier; needs a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.compiler.request import Request
from memfit.errors import SwapError
from memfit.ir.tiers import Tier, TransferSizes
from memfit.runtime.offload.backend import SwapSpace
from memfit.runtime.offload.disk import DiskSpace
from memfit.runtime.offload.link_benchmark import calibrate, keep
from memfit.runtime.offload.pinned_host import HostSpace
from memfit.tools.verify import Verification, verify
from tests.models import Residual
from tests.runtime.offload.test_streaming import Normalised
from tests.runtime.offload.test_streaming import loss_fn as mean_of_squares

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20


def spaces(nbytes: int) -> list[SwapSpace]:
    return [HostSpace(nbytes, torch.device("cuda")), DiskSpace(nbytes)]


@pytest.mark.parametrize("which", [0, 1])
def test_bytes_come_back_beside_compute(which: int) -> None:
    space = spaces(16 * MIB)[which]
    tensor = torch.randn(4 * MIB, device="cuda")
    expected = tensor.cpu()
    place = space.reserve(16 * MIB)
    for _ in range(20):
        leaving = space.out(tensor, place)
        leaving.wait()
        tensor.zero_()  # its memory is compute's again
        back = torch.empty_like(tensor)
        coming = space.into(back, place)
        coming.wait()
        tensor.copy_(back)
        assert torch.equal(tensor.cpu(), expected)
    space.release(place, 16 * MIB)
    assert space.reserved_bytes == 0
    space.close()


def test_the_host_has_a_limit() -> None:
    space = HostSpace(MIB, torch.device("cuda"), 2 * MIB)
    space.reserve(MIB)
    space.reserve(MIB)
    with pytest.raises(SwapError, match=r"more are to be swapped to the host"):
        space.reserve(MIB)


@pytest.mark.parametrize("tiers", ["host", "disk", "host:1MiB,disk"])
@pytest.mark.parametrize("strategy", ["swap", "hybrid", "auto"])
def test_bits_and_budget(tiers: str, strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    for tier in Tier:
        measured = calibrate(tier, torch.device("cuda:0"), seconds=0.02)
        keep(replace(measured, sizes=TransferSizes(least_bytes=1024)))
    torch.manual_seed(0)
    model = Residual().cuda()
    x, y = torch.randn(64, 3, 48, 48, device="cuda"), torch.arange(64, device="cuda") % 5

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y)

    def run(budget: int | str) -> None:
        request = Request(budget=budget, loss_fn=loss_fn, tiers=tiers, strategy=strategy, search_seconds=0.5)
        result = verify(model, (x,), {}, request, loss_fn=loss_fn, steps=3)
        assert [(c.kind, c.name) for c in result.checks if not c.equal] == []
        assert result.swapped_executed_bytes == result.swapped_planned_bytes
        assert result.peak_bytes <= result.plan.budget_bytes

    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        with pytest.raises(memfit.BudgetError) as error:
            run("1MiB")
        run(error.value.least_bytes)


@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_slices_pass_beside_compute(tiers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.compiler.driver.grids", lambda *_: [(1, 1, 16)])
    torch.manual_seed(0)
    model, x = Normalised().cuda(), torch.randn(16, 3, 128, 128, device="cuda")

    def run(budget: int | str) -> Verification:
        asked = Request(budget=budget, loss_fn=mean_of_squares, levers="all", tiers=tiers, search_seconds=0.5)
        return verify(model, (x,), {}, asked, loss_fn=mean_of_squares, steps=3)

    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        with pytest.raises(memfit.BudgetError) as error:
            run("1MiB")
        result = run(int(1.05 * error.value.least_bytes))
    assert result.plan.program.tier_resident()
    assert result.differing == ()
    assert result.swapped_executed_bytes == result.swapped_planned_bytes
    assert result.peak_bytes <= result.plan.budget_bytes
