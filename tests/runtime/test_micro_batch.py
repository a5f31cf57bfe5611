"""The batch goes through a step part by part: same gradients, and nothing of a part is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.compiler.request import Request
from memfit.ir.instructions import Compute
from memfit.tools.verify import verify
from memfit.zoo import build
from tests.short_nets import RESNET


def request(strategy: str, loss: Any = None, budget: int | str = "8GiB") -> Request:
    return Request(budget=budget, loss_fn=loss, levers="all", strategy=strategy, search_seconds=0.1, prove=False)


@pytest.mark.parametrize(
    ("spec", "batch", "shape"),
    [
        ("zoo:gpt?layers=1&width=64&heads=4", 6, (64,)),
        ("zoo:llama?layers=1&width=64&heads=4&kv_heads=2", 6, (64,)),
        pytest.param(RESNET, 6, (3, 64, 64), id="resnet"),
    ],
)
def test_parts_of_the_batch(spec: str, batch: int, shape: tuple[int, ...]) -> None:
    example = build(spec, batch=batch, shape=shape)
    args, loss = tuple(example.args), example.loss_fn
    result = verify(example.model, args, example.kwargs, request("micro-batch:6", loss), loss_fn=loss)
    assert result.plan.grid == (1, 1, 6) and "the batch in up to 6 micro-batches" in str(result.plan)
    assert not result.differing and result.fits
    assert result.recomputes_executed == result.recomputes_planned
    assert result.peak_bytes == pytest.approx(result.plan.predicted.peak_bytes, rel=0.03)
    chunks = {i.chunks for i in result.plan.program.instructions if isinstance(i, Compute) and i.sliced}
    assert 6 in chunks
    assert result.peak_bytes < result.plan.predicted.plain_peak_bytes


class Ranked(nn.Module):
    """Samples are put in the order of their norm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.first(x))
        return self.last(x.sort(0).values)


def test_what_mixes_samples_is_named() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(memfit.SpecError, match=r"aten.sort.* mixes its samples"):
        memfit.plan(Ranked(), (x,), budget="1GiB", levers="all", strategy="micro-batch:4", loss_fn=torch.sum)


class Contrasted(nn.Module):
    """Each sample is compared with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x) @ self.other(x).t()).log_softmax(1)


def test_samples_that_meet_all_others_are_mixed() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(memfit.SpecError, match=r"aten.mm.* mixes its samples"):
        memfit.plan(Contrasted(), (x,), budget="1GiB", levers="all", strategy="micro-batch:4", loss_fn=torch.sum)


def test_a_plan_names_what_ends_a_run() -> None:
    plan = memfit.plan(
        Ranked(), (torch.randn(8, 8),), budget="1GiB", levers="all", strategy="tile:1x1", loss_fn=torch.sum, prove=False
    )
    assert "what takes its operands whole: sort in the model" in str(plan)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_that_of_the_whole_batch(reduction: str) -> None:
    """However many labels of each part count."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 10)).double(), torch.randn(8, 8).double()
    labels = torch.randint(0, 10, (8,))
    labels[:5] = -100

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, labels, reduction=reduction)

    result = verify(model, (x,), {}, request("micro-batch:4", loss), loss_fn=loss)
    assert not result.differing and max(check.max_difference for check in result.checks) < 1e-12


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.full_search
def test_tight_budgets_cut_single_samples() -> None:
    """What no recomputation reaches, in a model without space or statistics, with dropout."""
    torch.manual_seed(0)
    layers = [(nn.LayerNorm(64), nn.Linear(64, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 64)) for _ in "ab"]
    model, args, loss = nn.Sequential(*sum(layers, ())), (torch.randn(4, 128, 64),), square
    with pytest.raises(memfit.BudgetError) as bitwise:
        memfit.plan(model, args, budget=1, loss_fn=loss, search_seconds=0.2, prove=False)
    with pytest.raises(memfit.BudgetError) as tiled:
        memfit.plan(model, args, budget=1, loss_fn=loss, levers="all", search_seconds=0.2, prove=False)
    assert tiled.value.least_bytes < 0.9 * bitwise.value.least_bytes
    asked = replace(request("auto", loss, tiled.value.least_bytes), search_seconds=0.2)
    result = verify(model, args, {}, asked, loss_fn=loss)
    assert result.plan.is_tiled and not result.differing and result.fits
    assert result.recomputes_executed == result.recomputes_planned
