"""Small steps of every kind, and the proof that a planned one is the plain one; for each device that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.compiler.proving import prove
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.sim.simulator import simulate_baseline
from memfit.tools.verify import verify
from memfit.zoo import build
from tests import models, short_nets

__all__ = ["CASES", "check_bits_and_budget", "image_case"]


def image_case(model: nn.Module, size: int, batch: int = 4) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, size, size), torch.randint(0, 5, (batch,))
    return model, (x,), {}, lambda output: nn.functional.cross_entropy(output, y)


def spec_case(spec: str, batch: int, shape: tuple[int, ...] | None) -> tuple[Any, ...]:
    device = torch.get_default_device()
    with torch.device("cpu"):
        example = build(spec, batch=batch, shape=shape, device=device)
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
    "resnet": lambda: spec_case(short_nets.RESNET, 4, (3, 64, 64)),
    "mobilenet": lambda: spec_case(short_nets.MOBILENET, 2, (3, 64, 64)),
    "unet": lambda: spec_case("zoo:unet?width=8&depth=1", 2, (3, 32, 32)),
    "gpt": lambda: spec_case("zoo:gpt?layers=1&width=64&heads=4&dropout=0.1", 2, (32,)),
    "llama": lambda: spec_case("zoo:llama?layers=1&width=64&heads=4&vocabulary=100", 2, (32,)),
    "lstm": lambda: spec_case("zoo:lstm-classifier?unrolled=true", 4, (2,)),
    "vit": lambda: spec_case("timm:vit_tiny_patch16_224?depth=1", 1, None),
    "t5": lambda: spec_case("hf:t5?num_layers=1&d_model=64&d_kv=32&d_ff=128&num_heads=2&vocab_size=200", 2, (16,)),
}
"""Model, inputs and loss, on the default device."""


def check_bits_and_budget(name: str, *shares: float, device: str = "cpu", slack_bytes: int = 0, **request: Any) -> None:
    """Plans a case for budgets between the bytes of its widest op (share 0) and its baseline peak (share 1); verifies
    all.

    Args:
        name: of the case.
        shares: of what is between, one for each budget.
        device: where the step runs.
        slack_bytes: what the allocator may leave unused, more than when the plan was proven.
        request: more of the request.
    """
    with torch.device(device):
        model, args, kwargs, loss_fn = CASES[name]()
    asked = Request(budget=1, loss_fn=loss_fn, search_seconds=0.1, **request)
    capture, graph = capture_and_profile(model, args, kwargs, asked)
    plain, wall = simulate_baseline(graph).peak_bytes, widest_op_bytes(graph)

    def planned(budget: int) -> memfit.Plan:
        try:
            return plan_captured(model, args, kwargs, capture, graph, asked, budget)
        except memfit.BudgetError as error:
            assert error.least_bytes > budget
            return plan_captured(model, args, kwargs, capture, graph, asked, error.least_bytes)

    for share in shares:
        budget = int(wall + share * (plain - wall))
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
        assert result.peak_bytes <= result.plan.budget_bytes + slack_bytes, (
            budget,
            result.peak_bytes,
            result.plan.measured_peak_bytes,
            predicted,
        )
        if name != "broken":  # plain autograd between the subgraphs is only bounded
            assert result.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.03, abs=slack_bytes or None)
        assert predicted.bound_overhead is None or predicted.bound_overhead <= predicted.overhead + 1e-9
