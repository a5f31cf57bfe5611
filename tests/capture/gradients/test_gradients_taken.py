"""Modules that take gradients in their forward passes stay plain code; where the model itself does, it is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit
from benchmarks.notices import notices
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import preserved
from memfit.compiler.proof import ProvingStep
from memfit.ir.graph import Op
from memfit.tools.verify import verify

X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


class Field(nn.Module):
    """Forces: the gradient of an energy by places, as Hamiltonian networks and force fields have it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


class Attack(nn.Module):
    """Moves its input along the sign of a gradient, with gradients on whatever the mode outside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            self.net(moved).square().sum().backward(inputs=[moved])
        assert moved.grad is not None
        return self.net(x + 0.1 * moved.grad.sign())


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("kind", [Field, Attack])
def test_what_is_around_such_a_module_is_planned(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(layers(), kind(), layers())
    fitted = copy.deepcopy(plain)
    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(fitted, (X,), budget="1KiB", loss_fn=loss_of, search_seconds=0.1)
    with notices() as told:
        memfit.fit(fitted, (X,), budget=least.value.least_bytes, loss_fn=loss_of, search_seconds=0.1)
    assert any("gradients are taken in 1 (" in text and "test_gradients_taken.py:" in text for text in told)
    assert any(op.module.startswith("0") for op in planned_ops(fitted))
    for seed in range(2):
        for model in (plain, fitted):
            torch.manual_seed(seed)
            model.zero_grad()
            loss_of(model(X)).backward()
        for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
            assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    plan = memfit.plan_of(fitted)
    assert verify(memfit.release(fitted), (X,), {}, plan, loss_fn=loss_of).fits


class Transformed(nn.Module):
    """Takes a gradient by a transform, which is captured, and breaks its graph elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        force = torch.func.grad(lambda z: self.last(z).square().sum())(x)
        torch._dynamo.graph_break()
        return self.last(force + x)


def test_transforms_are_planned() -> None:
    torch.manual_seed(0)
    plain = Transformed()
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (X,), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)
    for model in (plain, fitted):
        loss_of(model(X)).backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def planned_ops(model: nn.Module) -> list[Op]:
    plan = memfit.plan_of(model)
    assert plan.planned is not None
    return list(plan.planned.graph.ops)


@pytest.mark.parametrize("kind", [Field, Attack])
def test_a_model_that_does_it_itself_is_refused_with_the_line(kind: type[nn.Module]) -> None:
    pattern = r"gradients are taken in the forward pass of the model itself \(.*test_gradients_taken\.py:\d+\)"
    with pytest.raises(memfit.CaptureError, match=pattern):
        memfit.fit(kind(), (X,), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)


@pytest.mark.parametrize("kind", [Field, Attack])
def test_the_forward_pass_alone_proves_nothing_and_says_so(kind: type[nn.Module]) -> None:
    model = kind()
    with preserved(model) as state:
        step = ProvingStep(model=model, inputs=detached((X,), {}), loss_fn=loss_of, state=state)
        with pytest.raises(memfit.CaptureError, match=r"takes; prove=False plans without the proof"):
            step.plain(backward=False)
