"""Gradients of weights with several uses, where several forward passes share a backward pass: eager's order of sums."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.gradients.autograd_graph import nodes_behind

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A cell that runs four times; its weights have four uses and its biases too."""

    def __init__(self, *, counts: bool = False, breaks: bool = False, doubles: bool = False) -> None:
        super().__init__()
        self.stem, self.cell, self.counts, self.breaks = nn.Linear(16, 12), nn.RNNCell(12, 12), counts, breaks
        self.doubles = doubles
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls.add_(1)
        if self.doubles:
            x = x * 2
        x = nn.functional.dropout(self.stem(x), 0.2)
        if self.breaks:
            torch._dynamo.graph_break()
        state = torch.zeros_like(x)
        for _ in range(4):
            state = self.cell(x + state, state)
        return state + self.calls if self.counts else state


class Skipping(nn.Module):
    """Uses of one tensor before and behind a break, and a weight with two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.tanh(self.stem(x))
        torch._dynamo.graph_break()
        made = self.twice(torch.tanh(self.twice(kept)) * kept)
        torch._dynamo.graph_break()
        return self.head(made) * kept


class Tied(nn.Module):
    """A layer that both graphs use several times; a second output that is easily left without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(3):
            x = torch.tanh(self.tied(x))
        torch._dynamo.graph_break()
        for _ in range(3):
            x = torch.tanh(self.tied(x)) + x
        return self.head(x), self.tied(x).sigmoid()


class Halves(nn.Module):
    """A part under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = self.two(torch.tanh(self.one(x)))
        return x + made.float()


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def fitted(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    twin = copy.deepcopy(model)
    memfit.fit(model, (X,), budget="1GiB", loss_fn=square, search_seconds=0.05)
    return model, twin


def equal(model: nn.Module, twin: nn.Module) -> bool:
    return all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def alike(model: nn.Module, twin: nn.Module, step: Callable[[nn.Module], None], seed: int) -> bool:
    """Whether a step of both gives the same gradients."""
    for m in (model, twin):
        torch.manual_seed(seed)
        m.zero_grad()
        step(m)
    return equal(model, twin)


def both(model: nn.Module) -> None:
    (square(model(X)) + 2 * square(model(X + 1))).backward()


def one_of_two(model: nn.Module) -> None:
    first, second = square(model(X)), square(model(X + 1))
    (first if first > 0 else second).backward()


def with_penalty(model: nn.Module) -> None:
    penalty = model.cell.weight_hh.square().sum()
    (square(model(X)) + square(model(X + 1)) + penalty).backward()


def twice_backward(model: nn.Module) -> None:
    loss = square(model(X)) + square(model(X - 1))
    loss.backward(retain_graph=True)
    loss.backward()


def with_respect_to_some(model: nn.Module) -> None:
    loss = square(model(X)) + square(model(X - 1))
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("step", [both, one_of_two, with_penalty, twice_backward, with_respect_to_some])
def test_the_first_step_of_several_passes_has_the_bits_of_eager(
    step: Callable[[nn.Module], None], told: list[str]
) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Recurrent())
    for seed in range(2):
        assert alike(model, twin, step, seed), seed
    assert sum("forward passes before a backward pass" in text for text in told) == 1
    assert not any("up to rounding" in text for text in told)


def test_passes_of_subgraphs_have_the_bits_of_eager_too(told: list[str]) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Recurrent(breaks=True))
    for seed in range(2):
        assert alike(model, twin, both, seed), seed
    assert not any("up to rounding" in text for text in told)


def first_of_two(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return square(output[0])


def second_output_too(model: nn.Module) -> None:
    one, two = model(X)
    (square(one) + square(two)).backward()


def passes_of_the_first_output(model: nn.Module) -> None:
    (first_of_two(model(X)) + first_of_two(model(X + 1))).backward()


def the_first_output(model: nn.Module) -> None:
    first_of_two(model(X)).backward()


@pytest.mark.parametrize(
    ("step", "notices"), [(the_first_output, 0), (second_output_too, 1), (passes_of_the_first_output, 1)]
)
def test_a_layer_of_several_graphs_has_the_bits_of_eager_when_they_are_recomputed_too(
    step: Callable[[nn.Module], None], notices: int, told: list[str]
) -> None:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    memfit.fit(model, (X,), budget="1GiB", loss_fn=first_of_two, search_seconds=0.05)
    for seed in range(2):
        assert alike(model, twin, step, seed), seed
    assert len(told) == notices and not any("up to rounding" in text for text in told)


def test_where_later_code_adds_to_the_same_gradients_they_stay_right(told: list[str]) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Skipping())
    for number in range(2):
        for m in (model, twin):
            m.zero_grad()
            both(m)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        assert equal(model, twin) or (number == 0 and any("up to rounding" in text for text in told))


def overwriting(model: nn.Module) -> None:
    """Two passes in one backward pass; the input of the first, which no op saves, is overwritten in between."""
    x = X.clone()
    first = square(model(x))
    x.zero_()
    (first + 2 * square(model(X + 1))).backward()


def test_where_the_graph_cannot_be_recomputed_rounding_is_told_and_the_next_step_is_exact(told: list[str]) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Recurrent(doubles=True))
    if not alike(model, twin, overwriting, 0):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert sum("up to rounding" in text for text in told) == 1
    assert alike(model, twin, overwriting, 1)


def test_what_the_graph_reads_and_overwrites_is_kept(told: list[str]) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Recurrent(counts=True))
    assert all(alike(model, twin, both, seed) for seed in range(3))
    assert torch.equal(model.calls, twin.calls) and not any("up to rounding" in text for text in told)  # type: ignore[arg-type]


def test_a_loop_of_single_passes_pays_for_edges_in_its_first_step_only() -> None:
    torch.manual_seed(0)
    model, _ = fitted(Recurrent())
    for number in range(3):
        model.zero_grad()
        loss = square(model(X))
        assert any(type(node).__name__ == "_EdgesBackward" for node in nodes_behind([loss])) == (number == 0)
        loss.backward()


def test_casts_that_passes_of_one_region_share_are_told(told: list[str]) -> None:
    torch.manual_seed(0)
    model, twin = fitted(Halves())
    for m in (model, twin):
        both(m)  # each pass has its own region
    assert equal(model, twin) and not any("casts weights once" in text for text in told)
    for _ in range(2):
        for m in (model, twin):
            m.zero_grad()
            with torch.autocast("cpu", enabled=False):
                loss = square(m(X)) + 2 * square(m(X + 1))
            loss.backward()
    assert sum("casts weights once" in text for text in told) == 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=1e-3)
