"""Complex parameters and values: their sums in slices, rounding of their gradients, and parameters of zeros."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from benchmarks.notices import notices
from memfit.capture.state.snapshot import snapshot
from memfit.compiler.perturbed import constant_parameters, perturb
from memfit.compiler.tolerance import in_float64, is_within_rounding, own_rounding
from memfit.tools.verify import verify

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Spectral(nn.Module):
    """Filters of images, as spectral operators of neural PDE solvers learn them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.weight = nn.Parameter(0.2 * torch.randn(4, 32, 17, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        filtered = torch.fft.irfft2(torch.fft.rfft2(x) * self.weight, s=(32, 32))
        return self.last(torch.relu(filtered) + x)


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("levers", ["bitwise", "all"])
def test_a_step_is_the_baseline_step_at_the_least_budget(
    levers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))  # costs are measured here
    torch.manual_seed(0)
    model = Spectral()
    with notices() as told:
        with pytest.raises(memfit.BudgetError) as least:
            memfit.plan(model, (IMAGES,), budget="1KiB", loss_fn=square, levers=levers, search_seconds=0.2)
        budget = least.value.least_bytes
        plan = memfit.plan(model, (IMAGES,), budget=budget, loss_fn=square, levers=levers, search_seconds=0.2)
    assert told == []
    result = verify(model, (IMAGES,), {}, plan, loss_fn=square)
    assert result.fits
    assert result.differing == ()


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    square(model(x)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_rounding_is_that_of_both_parts() -> None:
    torch.manual_seed(0)
    model = Spectral()
    plain = gradients(copy.deepcopy(model), IMAGES)
    wide, (x,), _ = in_float64(copy.deepcopy(model), (IMAGES,), {})
    exact = gradients(wide, x)
    assert exact["weight"].dtype is torch.complex128
    own = own_rounding(plain, exact)
    assert own is not None and own < 1e-5
    gradient = plain["weight"]
    assert is_within_rounding(gradient, gradient, exact["weight"], scale=1.0, own=own)
    for reference in (exact["weight"], None):
        assert not is_within_rounding(gradient, gradient.conj(), reference, scale=1e-3, own=own)


def test_parameters_of_zeros_are_moved_in_both_parts() -> None:
    model = Spectral()
    with torch.no_grad():
        model.weight.zero_()
    perturb(constant_parameters(model, snapshot(model)))
    assert model.weight.real.any() and model.weight.imag.any()
