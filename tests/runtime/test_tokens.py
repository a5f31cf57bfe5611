"""With the lever `tile` a projection onto a vocabulary and its loss exist a few tokens at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.ir.graph import Phase
from memfit.ops.kernels.row_products import add_product_over_rows, product_over_rows
from memfit.tools.verify import verify


class Language(nn.Module):
    """A model of language that computes its loss; what it returns beside it, what its head has, how it is reduced."""

    def __init__(
        self, *, bias: bool = False, tied: bool = False, reduction: str = "mean", logits: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(600, 24), nn.LayerNorm(24)
        self.mix, self.head = nn.Linear(24, 24), nn.Linear(24, 600, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.reduction, self.logits = reduction, logits

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(tokens)
        logits = self.head(self.norm(x + functional.gelu(self.mix(x))))
        labels = labels.clamp(max=599)  # between the projection and its loss
        loss = functional.cross_entropy(logits.view(-1, 600), labels.view(-1), reduction=self.reduction)
        return {"loss": 3 * loss, "logits": logits} if self.logits else {"loss": 3 * loss}


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 600, (batch, length))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100  # what has no next token does not count
    labels[0, :5] = -100
    return tokens, labels


def tiled_request(**more: Any) -> Request:
    return Request(budget=1, levers="all", search_seconds=0.1, tiers="none", **more)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"bias": True, "tied": True}, torch.float32),
        ({"bias": True, "reduction": "sum"}, torch.float64),
    ],
    ids=str,
)
def test_less_memory_and_the_same_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    model, args = Language(**options).to(dtype), inputs(4, 67)
    with pytest.raises(memfit.BudgetError) as bitwise:
        memfit.plan(model, args, budget=1, prove=False)
    with pytest.raises(memfit.BudgetError) as tiled:
        memfit.plan(model, args, budget=1, levers="all", prove=False)
    assert tiled.value.least_bytes < 0.6 * bitwise.value.least_bytes
    request = Request(budget=tiled.value.least_bytes, levers="all", search_seconds=0.1, prove=False)
    result = verify(model, args, {}, request)
    assert [(c.kind, c.name, c.max_difference) for c in result.differing] == []
    assert result.rounded  # or nothing was summed in another order
    assert result.plan.is_tiled and result.fits
    assert result.peak_bytes == pytest.approx(result.plan.predicted.peak_bytes, rel=0.03)
    assert result.recomputes_executed == result.recomputes_planned


def test_labels_may_be_a_view_of_others() -> None:
    model, (tokens, labels) = Language(), inputs(1, 268)
    args = tokens, torch.cat((labels, labels), 1)[:, 1:269]  # one row of it is contiguous, and not all of its memory
    with pytest.raises(memfit.BudgetError) as bitwise:
        memfit.plan(model, args, budget=1, prove=False)
    with pytest.raises(memfit.BudgetError) as tiled:
        memfit.plan(model, args, budget=1, levers="all", prove=False)
    assert tiled.value.least_bytes < 0.6 * bitwise.value.least_bytes


def test_nothing_of_the_projection_runs_again() -> None:
    model, args = Language(), inputs(4, 67)
    _, graph = capture_and_profile(model, args, {}, tiled_request(), grid=(1, 1))
    with pytest.raises(memfit.BudgetError) as tiled:
        memfit.plan(model, args, budget=1, levers="all", prove=False)
    plan = memfit.plan(model, args, budget=int(tiled.value.least_bytes * 1.3), levers="all", prove=False)
    assert plan.is_tiled
    again = {graph.ops[i].target for i in plan.program.recomputed()}
    assert not again & {
        "aten._log_softmax.default",
        "aten.nll_loss_backward.default",
        "memfit.product_over_rows.default",
    }


def test_where_no_token_counts_gradients_are_zero() -> None:
    model, (tokens, labels) = Language(bias=True), inputs(4, 67)
    with pytest.raises(memfit.BudgetError) as tiled:
        memfit.plan(model, (tokens, labels), budget=1, levers="all", prove=False)
    memfit.fit(model, (tokens, labels), budget=tiled.value.least_bytes, levers="all")
    model(tokens, torch.full_like(labels, -100))["loss"].backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert model.head.weight.grad is not None


def test_autocast() -> None:
    model, args = Language(), inputs(4, 67)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(memfit.BudgetError) as bitwise:
            memfit.plan(model, args, budget=1, prove=False)
        with pytest.raises(memfit.BudgetError) as tiled:
            memfit.plan(model, args, budget=1, levers="all", prove=False)
        assert tiled.value.least_bytes < 0.6 * bitwise.value.least_bytes
        request = Request(budget=tiled.value.least_bytes, levers="all", search_seconds=0.1, prove=False)
        result = verify(model, args, {}, request)
    assert [(c.kind, c.name, c.max_difference) for c in result.differing] == []


def test_what_is_returned_exists_whole() -> None:
    model, args = Language(logits=True), inputs(4, 67)
    with pytest.raises(memfit.BudgetError) as bitwise:
        memfit.plan(model, args, budget=1, prove=False)
    request = Request(budget=bitwise.value.least_bytes, levers="all", search_seconds=0.1, prove=False)
    result = verify(model, args, {}, request)
    assert not result.differing and result.fits


class Weighted(nn.Module):
    """Losses with weights of classes, one of them used twice, and one of another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 300)
        self.register_buffer("weights", torch.linspace(0.5, 2, 300))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        likely = functional.log_softmax(logits, 1)
        loss = functional.nll_loss(likely, labels, weight=self.weights)
        return {"loss": loss + 0.1 * likely.exp().square().mean()}


def test_a_loss_beside_others_and_with_weights() -> None:
    torch.manual_seed(0)
    model = Weighted()
    args = (torch.randn(90, 16, requires_grad=True), torch.randint(0, 300, (90,)))
    with pytest.raises(memfit.BudgetError) as tiled:
        memfit.plan(model, args, budget=1, levers="all", prove=False)
    request = Request(budget=tiled.value.least_bytes, levers="all", search_seconds=0.1, prove=False)
    result = verify(model, args, {}, request)
    assert [(c.kind, c.name, c.max_difference) for c in result.differing] == []
    assert result.fits


@pytest.mark.parametrize(("dtype", "is_early"), [(torch.bfloat16, True), (torch.float16, False)])
def test_sums_that_might_overflow_before_they_are_scaled_are_not_made_early(dtype: torch.dtype, is_early: bool) -> None:
    with torch.autocast("cpu", dtype=dtype):
        _, graph = capture_and_profile(Language(), inputs(4, 67), {}, tiled_request(), grid=(1, 1))
    softmax = next(op for op in graph.ops if "_log_softmax_backward_data" in op.target)
    assert (softmax.phase is Phase.FORWARD) is is_early


def test_products_over_rows_add_up() -> None:
    one, other = torch.randn(50, 7, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    total = torch.zeros(7, 3, dtype=torch.float64)
    for start in range(0, 50, 8):
        add_product_over_rows(one[start : start + 8], other[start : start + 8], total)
    torch.testing.assert_close(total, product_over_rows(one, other), rtol=1e-12, atol=1e-12)
