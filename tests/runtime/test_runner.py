"""Another runner than the code that FX generates runs the same program, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.runtime.executable import compile_program
from memfit.runtime.runner import BoxedFunction
from tests import models


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output)) % 5)


class Interpreting:
    """Runs graphs node by node, with FX's interpreter, which forgets values after their last use."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, module: fx.GraphModule) -> BoxedFunction:
        name = type(module).__name__

        def run(operands: list[Any]) -> Any:
            self.ran.append(name)
            return fx.Interpreter(module).boxed_run(operands)

        return run


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_an_interpreter_runs_a_plan_with_the_same_bits(share: float) -> None:
    torch.manual_seed(0)
    model, x = models.Residual(), torch.randn(24, 3, 24, 24)
    asked = Request(budget=1, loss_fn=loss_fn, search_seconds=0.1)
    capture, graph = capture_and_profile(model, (x,), {}, asked)
    room = plan_captured(model, (x,), {}, capture, graph, asked, 1 << 30).predicted.plain_peak_bytes
    plan = plan_captured(model, (x,), {}, capture, graph, asked, int(share * room))
    runner = Interpreting()
    found = []
    for call in (
        model,
        compile_program(model, capture, plan.program),
        compile_program(model, capture, plan.program, runner=runner),
    ):
        model.zero_grad()
        torch.manual_seed(1)
        output = call(x)
        loss_fn(output).backward()
        found.append([output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(runner.ran) == 2
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert bool(plan.program.recomputed()) == (share < 1)
