"""A gradient for an output that the given loss does not use: the bits stay, and the next step is planned with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import memfit

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


class Heads(nn.Module):
    """Two heads on a body that draws random numbers and updates buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(16), nn.Linear(16, 32)
        self.a, self.b, self.breaks = nn.Linear(32, 8), nn.Linear(32, 4), False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = nn.functional.dropout(torch.tanh(self.body(self.norm(x))), 0.3)
        if self.breaks:
            torch._dynamo.graph_break()
        hidden = nn.functional.dropout(hidden.sin(), 0.2)
        return self.a(hidden), self.b(hidden)


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos()


class OwnFunction(Heads):
    """The same, with a function of its own, whose body is a graph inside of Dynamo's graph."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(cast(torch.Tensor, _Sine.apply(x * self.norm.weight)))


class Counting(Heads):
    """The same, with a buffer that is read and overwritten, as the running statistics of some normalisations are."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, other = super().forward(x * (self.seen + 1))
        made = hidden, other * self.seen.cos()
        self.seen.add_(1)
        return made


class Doubling(Heads):
    """The same, on inputs that no op saves, so that the loop may overwrite them before the backward pass."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * 2)


def first(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[0].square().mean()


def second(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[1].sin().mean()


def both(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return first(output) + second(output)


def pair(model: Heads) -> tuple[Heads, Heads]:
    fitted = copy.deepcopy(model)
    memfit.fit(fitted, (X,), budget="64MiB", loss_fn=first, search_seconds=0.2)
    return model, fitted


def assert_same(plain: nn.Module, fitted: nn.Module, step: Callable[[nn.Module], object]) -> None:
    states = []
    for model in (plain, fitted):
        model.zero_grad()
        torch.manual_seed(1)
        step(model)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for (name, p), q in zip(plain.named_parameters(), fitted.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(plain.named_buffers(), fitted.buffers(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    ("kind", "breaks", "loss"),
    [
        (Heads, False, both),
        (Heads, True, second),
        (OwnFunction, False, both),
        (Counting, False, both),
        (Counting, False, second),
    ],
)
def test_its_step_has_the_bits_of_the_plain_one_and_the_next_is_planned(
    kind: type[Heads], breaks: bool, loss: Callable[..., torch.Tensor], told: list[str]
) -> None:
    torch.manual_seed(0)
    model = kind()
    model.breaks = breaks
    plain, fitted = pair(model)
    assert_same(plain, fitted, lambda m: loss(m(X)).backward())
    assert sum("a gradient arrived for an output" in text for text in told) == 1
    before = len(told)
    for following in (loss, first):
        assert_same(plain, fitted, lambda m, following=following: following(m(X)).backward())  # type: ignore[misc]
    assert len(told) == before


def test_a_graph_kept_for_a_second_backward_pass_is_recomputed_twice(told: list[str]) -> None:
    torch.manual_seed(0)
    plain, fitted = pair(Heads())

    def step(model: nn.Module) -> None:
        output = model(X)
        second(output).backward(retain_graph=True)
        first(output).backward(retain_graph=True)
        both(output).backward()

    assert_same(plain, fitted, step)


def test_under_autocast_with_gradients_of_inputs(told: list[str]) -> None:
    torch.manual_seed(0)
    plain, fitted = pair(Heads())
    found = []
    for model in (plain, fitted):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        found.append(torch.autograd.grad(both(output), [x, *model.parameters()]))
    assert all(map(torch.equal, *found))
    assert any("a gradient arrived for an output" in text for text in told)


def test_a_pass_that_cannot_run_again_is_refused() -> None:
    torch.manual_seed(0)
    plain, fitted = pair(Doubling())

    def step(model: nn.Module) -> None:
        x = X.clone()
        loss = second(model(x))
        x.zero_()
        loss.backward()

    with pytest.raises(memfit.PlanMismatchError, match="cannot be recomputed"):
        step(fitted)
    step(plain)
    assert_same(plain, fitted, step)
