"""What a CUDA device shows of pipelines: stages in turns on the one card, and each device's peak measured alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

_DEVICE = "cuda"
_WIDTH = 512


@pytest.mark.parametrize("one_device", [True, False])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_stages_on_the_card_keep_gradients_and_budget(microbatches: int, one_device: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 10)).to(_DEVICE, torch.float64)
    x = torch.randn(512, _WIDTH, device=_DEVICE, dtype=torch.float64)
    y = torch.randint(10, (512,), device=_DEVICE)
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(x), y).backward()

    def piped(budget: int | None) -> memfit.Pipeline:
        return memfit.pipeline(
            *(model, (x,)),
            target=y,
            loss_fn=nn.functional.cross_entropy,
            num_stages=2,
            num_microbatches=microbatches,
            schedule="1f1b",
            budget_per_device=budget,
            one_device=one_device,
        )

    saved_bytes = 65 << 20  # of cuBLAS, which no plan can do without
    budget = int(saved_bytes + 0.9 * (max(piped(None).plan.peak_bytes) - saved_bytes))
    pipe = piped(budget)
    assert max(pipe.plan.measured_peak_bytes) <= budget
    pipe.step(x, target=y)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        if microbatches == 1:
            assert torch.equal(ours.grad, theirs.grad)
        else:
            assert (ours.grad - theirs.grad).abs().max() <= 1e-12 * theirs.grad.abs().max()
