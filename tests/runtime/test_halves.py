"""A convolution's two gradients are made in one call where the budget leaves room, with the same bits and within it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.ir.graph import Phase
from memfit.ir.program import baseline_order, program_of
from memfit.runtime.executable import compile_program
from memfit.sim.verifier import check
from tests.counted_ops import CountedOps

_CONVOLUTIONS = 2


def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, *[12] * (_CONVOLUTIONS - 1)):
        layers += [nn.Conv2d(channels, 12, 3, padding=1, bias=len(layers) % 2 == 0), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))
    return model.train(), torch.randn(8, 3, 24, 24), torch.randint(5, (8,))


def plan(budget: int | str, *, steps: int = 1) -> tuple[int, memfit.Plan]:
    """How often a fitted model called the backward pass of a convolution in its last step, and its plan."""
    model, x, y = made()
    plain = copy.deepcopy(model)
    fitted = memfit.fit(model, (x,), budget=budget, loss_fn=lambda output: functional.cross_entropy(output, y))
    for _ in range(steps):
        functional.cross_entropy(plain(x), y).backward()
        loss = functional.cross_entropy(fitted(x), y)
        with CountedOps() as counting:
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    return counting.calls[torch.ops.aten.convolution_backward.default], memfit.plan_of(fitted)


@pytest.mark.smoke
def test_one_call_where_there_is_room_and_two_where_there_is_none() -> None:
    calls, ample = plan("1GiB", steps=2)
    assert calls == _CONVOLUTIONS
    with pytest.raises(memfit.BudgetError) as error:
        plan(1 << 10)
    least = error.value.least_bytes
    assert least < ample.predicted.peak_bytes
    calls, tight = plan(least)
    assert calls > _CONVOLUTIONS
    assert tight.measured_peak_bytes <= least


class StepInTheForwardPass(nn.Module):
    """Takes a step of gradient descent in its forward pass, as meta-learning does, so the halves run there too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 3, 3, 3) * 0.2)
        self.second = nn.Parameter(torch.randn(8, 8, 3, 3) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def output(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return functional.conv2d(torch.tanh(functional.conv2d(x, first, padding=1)), second, padding=1)

        weights = (self.first, self.second)
        slopes = torch.func.grad(lambda both: output(*both).square().mean())(weights)
        return output(*(weight - 0.1 * slope.tanh() * slope for weight, slope in zip(weights, slopes, strict=True)))


@pytest.mark.parametrize("which", [0, 1])
def test_halves_that_ran_in_one_call_are_recomputed_alone(which: int) -> None:
    torch.manual_seed(0)
    model, x = StepInTheForwardPass(), torch.randn(4, 3, 12, 12)
    capture, graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=mean_square))
    halves = [i for i, op in enumerate(graph.ops) if op.half_of and op.phase is Phase.FORWARD]
    assert len(halves) == 2 and halves[1] == halves[0] + 1
    order = baseline_order(graph)
    half = graph.ops[halves[which]]
    order.insert(next(i for i in order[graph.loss_index :] if half.writes[0] in graph.ops[i].reads), halves[which])
    program = program_of(graph, order)
    check(graph, program)
    assert program.recomputed() == [halves[which]]
    call = compile_program(model, capture, program)
    gradients = []
    for run in (model, call):
        model.zero_grad()
        mean_square(run(x)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))  # type: ignore[arg-type]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()
