"""Models whose code takes another way than when they were planned: the same bits, and training does not end."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memfit

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


class Chances(nn.Module):
    """Layers that are passed by at random, by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + torch.tanh(layer(x))
        return x * self.layers[0].weight.mean()


class Turning(nn.Module):
    """A part with effects of its own, a break of the graph, and a part that changes with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(16), nn.Linear(16, 32), nn.Linear(32, 8)
        self.turned, self.calls = False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.dropout(torch.tanh(self.a(self.norm(x))), 0.3)
        torch._dynamo.graph_break()
        return self.b(hidden.sin() * 2 if self.turned else hidden)


class Effects(Turning):
    """The same where nothing before the break needs a gradient, and planned as one graph at first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = nn.functional.dropout(x, 0.3)
        if self.turned:
            torch._dynamo.graph_break()
        return self.b(torch.tanh(self.a(self.norm(x))))


class Weighed(Turning):
    """Weights of samples that no gradient reaches, which are made another way with an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = x.sin()
        if self.turned:
            weights = (x.unsqueeze(2) * x.unsqueeze(1)).cos().sum(2)
        torch._dynamo.graph_break()
        return self.b(torch.tanh(self.a(self.norm(x * weights))))


class Masked(nn.Module):
    """Masks rows at random, by NumPy's generator, as speech models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)
        self.filling = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        masked = np.zeros(len(x), dtype=bool)
        masked[np.random.choice(len(x), int(0.3 * len(x) + np.random.rand(1).item()), replace=False)] = True
        hidden[torch.tensor(masked)] = self.filling
        return self.second(hidden.sin())


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(model: nn.Module, seed: int) -> tuple[Any, ...]:
    model.zero_grad()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loss = square(model(X))
    loss.backward()
    return loss.detach(), torch.get_rng_state(), random.getstate()


def assert_same_steps(plain: nn.Module, fitted: nn.Module, seed: int) -> None:
    (loss, state, python), (loss_by_plan, state_by_plan, python_by_plan) = step(plain, seed), step(fitted, seed)
    assert torch.equal(loss, loss_by_plan)
    assert torch.equal(state, state_by_plan)
    assert python == python_by_plan
    for (name, p), q in zip(plain.named_parameters(), fitted.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(plain.named_buffers(), fitted.buffers(), strict=True):
        assert torch.equal(p, q), name


def way_of(seed: int) -> tuple[bool, ...]:
    random.seed(seed)
    return tuple(random.random() < 0.5 for _ in range(3))


def test_a_step_of_which_nothing_can_be_captured_runs_plainly(told: list[str]) -> None:
    torch.manual_seed(0)
    plain = Chances()
    fitted = copy.deepcopy(plain)
    seeds = {way_of(seed): seed for seed in range(100)}
    random.seed(seeds[True, False, True])
    memfit.fit(fitted, (X,), budget="1GiB", loss_fn=square, search_seconds=0.2)
    nothing = seeds[False, False, False]
    for seed in (nothing, nothing, seeds[True, True, True], nothing, *range(4)):
        assert_same_steps(plain, fitted, seed)
    assert "nothing of the model can be captured" in " ".join(told)
    assert "runs plainly" in " ".join(told)


def test_a_part_without_gradients_that_changes_is_told(told: list[str]) -> None:
    torch.manual_seed(0)
    plain = Weighed()
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (X,), budget="1GiB", loss_fn=square, search_seconds=0.2)
    assert_same_steps(plain, fitted, 0)
    assert not any("another way" in text for text in told)
    plain.turned = fitted.turned = True
    assert_same_steps(plain, fitted, 1)
    assert sum("another way" in text for text in told) == 1
    assert_same_steps(plain, fitted, 2)  # planned again
    plain.turned = fitted.turned = False
    for seed in (3, 4):
        assert_same_steps(plain, fitted, seed)
    assert sum("another way" in text for text in told) == 2  # each time that it is planned again


def test_random_numbers_of_numpy_are_numpys() -> None:
    torch.manual_seed(0)
    plain = Masked()
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (X,), budget="1GiB", loss_fn=square, search_seconds=0.2)
    for seed in range(3):
        assert_same_steps(plain, fitted, seed)


@pytest.mark.parametrize("kind", [Turning, Effects])
def test_code_before_an_unplanned_graph_runs_once(kind: type[Turning], told: list[str]) -> None:
    torch.manual_seed(0)
    plain = kind()
    fitted = copy.deepcopy(plain)
    memfit.fit(fitted, (X,), budget="1GiB", loss_fn=square, search_seconds=0.2)
    assert_same_steps(plain, fitted, 1)
    plain.turned = fitted.turned = True
    for seed in range(2, 5):
        assert_same_steps(plain, fitted, seed)
        assert fitted.calls == plain.calls
    # One graph is planned anew before any of its code runs, and the user is told once.
    assert ("its code took another way" in " ".join(told)) == (kind is Turning)
    assert sum("changed since it was planned" in text for text in told) == (kind is Effects)


def test_a_changed_module_that_takes_more_than_the_budget_goes_on(told: list[str]) -> None:
    torch.manual_seed(0)
    fitted: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    plain = copy.deepcopy(fitted)
    with pytest.raises(memfit.BudgetError) as least:
        memfit.fit(fitted, (X,), budget="1KiB", loss_fn=square, search_seconds=0.2)
    memfit.fit(fitted, (X,), budget=least.value.least_bytes, loss_fn=square, search_seconds=0.2)
    for model in (plain, fitted):
        torch.manual_seed(1)
        model[1] = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    for seed in range(2):
        assert_same_steps(plain, fitted, seed)
    assert "takes more than its budget" in " ".join(told)
