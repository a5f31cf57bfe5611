"""Subgraphs of a model with graph breaks hand over what the baseline step would, hooks and in-place code included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.training_step import capture_step
from memfit.ir.residents import ResidentKind, bytes_of


class _Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 0.5


class _Breaks(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh() * self.scale
        torch._dynamo.graph_break()
        x = between(x, self.kind)
        x = self.second(x)
        if self.kind == "hook":
            x = x * self.scale
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.last(x.tanh())


@torch.compiler.disable
def between(x: torch.Tensor, kind: str) -> torch.Tensor:
    match kind:
        case "function in place":
            return _Halve.apply(x)  # type: ignore[no-untyped-call, no-any-return]
        case "in place":
            return x.mul_(0.5)
        case "of a view in place":
            x[:, :8].zero_()
            return x
        case "leaf":
            return x * (0.25 if x.is_leaf else 0.5)
    return x


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


@pytest.mark.parametrize("kind", ["function in place", "in place", "of a view in place", "leaf", "hook"])
def test_subgraphs_hand_over_what_the_baseline_step_does(kind: str) -> None:
    torch.manual_seed(0)
    plain = _Breaks(kind)
    fitted = copy.deepcopy(plain)
    x = torch.randn(64, 16)
    memfit.fit(fitted, (x,), budget="1MiB", loss_fn=loss_fn, search_seconds=0.2)
    planned = memfit.plan_of(fitted).planned
    assert (
        planned is not None and not planned.capture.subgraphs.plain.only_children
    )  # code of forward itself is planned
    for _ in range(2):
        outputs = [model(x) for model in (plain, fitted)]
        for output in outputs:
            loss_fn(output).backward()
        assert torch.equal(*outputs)
    for expected, found in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        assert torch.equal(expected.grad, found.grad)


@torch.compiler.disable
def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3).sin()


@torch.compiler.disable
def _behind(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 3).exp()


class _CodeBehind(nn.Module):
    """Two subgraphs with plain code between them, and such behind them that saves its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 7, 3, padding=1), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _behind(self.second(_turned(torch.tanh(self.first(x)))))


def test_reading_the_loss_leaves_code_behind_the_last_subgraph_its_graph() -> None:
    """It is run backward again, for the layout of the gradient of the last subgraph: a bias's is its sum."""
    torch.manual_seed(0)
    model, x = _CodeBehind(), torch.randn(4, 3, 9, 10)
    plain = copy.deepcopy(model)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output * torch.linspace(0.1, 1.0, output.numel()).view(output.shape)).square().mean()

    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    for each in (model, plain):
        loss(each(x)).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


class PartlyUsed(nn.Module):
    """A part that no output reaches, one that plain code runs, and one whose penalty is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.penalized = nn.Linear(8, 8), nn.Linear(64, 64), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        return plainly(hidden, self.scale).exp()


@torch.compiler.disable
def plainly(x: Tensor, scale: Tensor) -> Tensor:
    return (x[:, None] * scale).sum(1)


def test_only_gradients_that_come_are_counted() -> None:
    def loss_of(output: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in model.penalized.parameters()), torch.zeros(()))
        return output.square().mean() + penalty

    model, x = PartlyUsed(), torch.randn(4, 8)
    penalized = 4 * sum(p.numel() for p in model.penalized.parameters())
    scale = 4 * model.scale.numel()
    captures = [capture_step(model, (x,), {}, loss_fn=f) for f in (lambda output: output.square().mean(), loss_of)]
    bare, whole = (bytes_of(capture.graph.residents, ResidentKind.PLAIN_CODE) for capture in captures)
    assert whole == bare + penalized
    assert scale <= bare < scale + 4 * 4 * 16 * 8 * 2
