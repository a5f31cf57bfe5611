"""A planned step has the bits of the plain one, stays within its budget, and runs as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.making import prove
from memfit.planner.bound import op_wall_bytes
from memfit.planning import Request, capture_and_profile, plan_captured
from memfit.step.simulate import simulate_plain
from memfit.verification import verify
from memfit.zoo import build
from tests import models


def image_case(model: nn.Module, size: int, batch: int = 4) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, size, size), torch.randint(0, 5, (batch,))
    return model, (x,), {}, lambda output: nn.functional.cross_entropy(output, y)


def spec_case(spec: str, batch: int, shape: tuple[int, ...] | None) -> tuple[Any, ...]:
    example = build(spec, batch=batch, shape=shape)
    return example.model, example.args, example.kwargs, example.loss_fn


def tied_case() -> tuple[Any, ...]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4, 32))
    return models.Tied(), (tokens,), {"labels": tokens}, None


def vector_case(model: nn.Module) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return model, (torch.randn(64, 16),), {}, lambda output: (output**2).mean()


CASES = {
    "residual": lambda: image_case(models.Residual(), 24),
    "tied": tied_case,
    "frozen": lambda: vector_case(models.Frozen()),
    "broken": lambda: vector_case(models.Broken()),
    "layouts": lambda: image_case(models.Layouts(), 16),
    "masked": lambda: (models.Masked(), (torch.randn(4, 24, 32),), {}, lambda output: (output**2).mean()),
    "kernels": lambda: image_case(models.Kernels(), 16),
    "kernels of one sample": lambda: image_case(models.Kernels(), 16, batch=1),
    "resnet18": lambda: spec_case("torchvision:resnet18", 4, (3, 64, 64)),
    "mobilenet_v2": lambda: spec_case("torchvision:mobilenet_v2", 2, (3, 64, 64)),
    "unet": lambda: spec_case("zoo:unet?width=8", 2, (3, 32, 32)),
    "gpt": lambda: spec_case("zoo:gpt?layers=2&width=64&heads=4&dropout=0.1", 2, (32,)),
    "llama": lambda: spec_case("zoo:llama?layers=2&width=64&heads=4&vocabulary=100", 2, (32,)),
    "lstm": lambda: spec_case("zoo:lstm-classifier?unrolled=true", 4, (8,)),
    "vit": lambda: spec_case("timm:vit_tiny_patch16_224?depth=2", 1, None),
    "bert": lambda: spec_case(
        "hf:bert?num_hidden_layers=1&hidden_size=64&num_attention_heads=2&intermediate_size=128&vocab_size=200",
        2,
        (32,),
    ),
    "gpt2": lambda: spec_case("hf:gpt2?n_layer=1&n_embd=64&n_head=2&vocab_size=200", 2, (32,)),
    "t5": lambda: spec_case("hf:t5?num_layers=1&d_model=64&d_kv=32&d_ff=128&num_heads=2&vocab_size=200", 2, (16,)),
}
LARGE = ("resnet18", "unet", "gpt", "llama", "lstm", "mobilenet_v2", "vit", "bert", "gpt2", "t5")
"""At one budget only, the one at which most runs again."""

SMOKE = ("residual", "tied", "frozen", "broken", "layouts", "kernels", "kernels of one sample")


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=[pytest.mark.smoke] if name in SMOKE else [])
        for name in CASES
        for share in ((0.25,) if name in LARGE else (0.7, 0.25))
    ],
)
def test_bits_and_budget(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Results go over memory that others leave wherever they can, not only where these small ones are quicker so.
    monkeypatch.setattr("memfit.planner.spares._is_quicker", lambda *_: True)
    model, args, kwargs, loss_fn = CASES[name]()
    request = Request(budget=1, loss_fn=loss_fn, search_seconds=0.1)
    capture, graph = capture_and_profile(model, args, kwargs, request)
    plain, wall = simulate_plain(graph).peak_bytes, op_wall_bytes(graph)
    budget = int(wall + share * (plain - wall))

    def planned(budget: int) -> memfit.Plan:
        try:
            return plan_captured(model, args, kwargs, capture, graph, request, budget)
        except memfit.BudgetError as error:
            assert error.least_bytes > budget
            return plan_captured(model, args, kwargs, capture, graph, request, error.least_bytes)

    result = verify(model, args, kwargs, planned(budget))
    if not result.fits:  # measured peaks differ by a little, which the proving run finds out
        try:
            plan = prove(model, args, kwargs, result.plan)
        except memfit.BudgetError as error:
            plan = prove(model, args, kwargs, planned(error.least_bytes))
        result = verify(model, args, kwargs, plan)
    unequal = [(c.kind, c.name, c.max_difference) for c in result.checks if not c.equal]
    assert not unequal
    assert {"gradient", "random state"} <= {c.kind for c in result.checks}
    assert result.recomputes_executed == result.recomputes_planned
    predicted = result.plan.predicted
    assert result.peak_bytes <= result.plan.budget_bytes
    if name != "broken":  # plain autograd between the pieces is only bounded
        assert result.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.03)
    assert predicted.bound_overhead is None or predicted.bound_overhead <= predicted.overhead + 1e-9


@pytest.mark.parametrize("strategy", ["sqrt", "every-block", "openai-speed", "openai-memory", "sequential:2", "rotor"])
def test_every_strategy_runs_exactly(strategy: str) -> None:
    model, args, kwargs, loss_fn = image_case(models.Residual(blocks=2), 16)
    request = Request(budget="2GiB", loss_fn=loss_fn, strategy=strategy, prove=False)
    result = verify(model, args, kwargs, request, loss_fn=loss_fn)
    assert all(c.equal for c in result.checks)
    assert result.recomputes_executed == result.recomputes_planned


def test_autocast_is_exact() -> None:
    model, args, kwargs, loss_fn = CASES["residual"]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = memfit.plan(model, args, kwargs, budget="1GiB", loss_fn=loss_fn, prove=False).predicted.plain_peak_bytes
        result = verify(model, args, kwargs, Request(budget=int(plain * 0.8), loss_fn=loss_fn), loss_fn=loss_fn)
    assert all(c.equal for c in result.checks)
