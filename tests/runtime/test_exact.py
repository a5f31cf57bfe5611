"""A planned step has the bits of the plain one, stays within its budget, and runs as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.tools.verify import verify
from tests.models import Residual
from tests.runtime.cases import CASES, check_bits_and_budget, image_case

SMOKE = ("residual", "tied", "frozen", "broken", "layouts", "kernels", "kernels of one sample")
TWICE = ("residual", "broken")
"""At two budgets, the others at one, where most runs again."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else []) for name in CASES]
)
def test_bits_and_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Results go over memory that others leave wherever they can, not only where these small ones are quicker so.
    monkeypatch.setattr("memfit.planner.finalize.buffer_reuse._is_quicker", lambda *_: True)
    check_bits_and_budget(name, *((0.7, 0.25) if name in TWICE else (0.25,)))


@pytest.fixture(scope="module")
def residual() -> tuple[Any, ...]:
    """A model, its inputs and its loss, captured and profiled."""
    model, args, kwargs, loss_fn = image_case(Residual(blocks=1), 24)
    return model, args, kwargs, loss_fn, *capture_and_profile(model, args, kwargs, Request(budget=1, loss_fn=loss_fn))


@pytest.mark.parametrize("strategy", ["sqrt", "every-block", "openai-speed", "openai-memory", "sequential:2", "rotor"])
def test_every_strategy_runs_exactly(strategy: str, residual: tuple[Any, ...]) -> None:
    model, args, kwargs, loss_fn, *step = residual
    request = Request(budget="2GiB", loss_fn=loss_fn, strategy=strategy)
    result = verify(model, args, kwargs, plan_captured(model, args, kwargs, *step, request, 2 << 30))
    assert all(c.equal for c in result.checks)
    assert result.recomputes_executed == result.recomputes_planned


def test_autocast_is_exact() -> None:
    model, args, kwargs, loss_fn = image_case(Residual(blocks=1), 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        request = Request(budget="1GiB", loss_fn=loss_fn, strategy="every-block", prove=False)
        result = verify(model, args, kwargs, request)
    assert all(c.equal for c in result.checks)
    assert result.recomputes_executed == result.recomputes_planned > 0


class Resized(nn.Module):
    """Calls that tracing would take apart into others, with other bits."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = {"bilinear": {"scale_factor": 2}, "bicubic": {"size": 37}, "nearest": {"scale_factor": 1.5}}
        for convolution, (mode, how) in zip(self.convolutions, ways.items(), strict=False):
            x = functional.interpolate(convolution(x), mode=mode, **how)
        x = functional.interpolate(x, size=(40, 41), mode="bilinear", align_corners=True)
        return functional.hardshrink(self.convolutions[3](x), 0.1)


@pytest.mark.smoke
def test_resizing_has_the_bits_of_its_kernels() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 17, 19, requires_grad=True)
    request = Request(budget="1GiB", loss_fn=loss, strategy="every-block", prove=False)
    result = verify(Resized(), (x,), {}, request, loss_fn=loss)
    assert not result.differing and all(c.equal for c in result.checks)
    assert result.recomputes_executed == result.recomputes_planned > 0


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()
