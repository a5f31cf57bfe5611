"""A model that was planned is freed with its last reference, though PyTorch keeps every backend it compiled with."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture.dynamo import compiled_call
from memfit.runtime.executable import compile_program

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Breaking(nn.Module):
    """Two graphs, a module of torch's own between them, and a number that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if hidden.sum().item() > 1e9:
            hidden = -hidden
        made: Tensor = self.second(self.between(hidden).exp())
        return made


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def whole() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 8))


def fit(model: nn.Module) -> None:
    memfit.fit(model, (X,), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    memfit.fit(model, (X,), budget="1GiB", loss_fn=loss_of, optimizer=optimizer, search_seconds=0.1)
    for _ in range(2):
        loss_of(model(X)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model(X[:4])).backward()  # of another size, so planned anew


def plan(model: nn.Module) -> None:
    memfit.plan(model, (X,), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)


def estimate(model: nn.Module) -> None:
    memfit.estimate(model, (X,), loss_fn=loss_of)


def fail(model: nn.Module) -> None:
    with contextlib.suppress(memfit.BudgetError):
        memfit.fit(model, (X,), budget="1KiB", loss_fn=loss_of, search_seconds=0.1)


def release(model: nn.Module) -> None:
    fit(model)
    memfit.release(model)


@pytest.mark.parametrize(
    ("use", "make"),
    [
        pytest.param(train, whole, marks=pytest.mark.smoke),
        (plan, whole),
        (estimate, whole),
        (fail, whole),
        (release, whole),
        (train, Breaking),
        (release, Breaking),
    ],
)
def test_nothing_keeps_a_planned_model(use: Callable[[nn.Module], None], make: Callable[[], nn.Module]) -> None:
    model = make()
    use(model)
    alive = [weakref.ref(one) for one in (model, *model.parameters())]
    del model
    gc.collect()
    assert all(one() is None for one in alive)


def test_nothing_keeps_another_model_that_runs_a_plan() -> None:
    """Its call is compiled anew, and AOTAutograd keeps the compilers of its graphs."""
    model, other = Breaking(), Breaking()
    made = memfit.plan(model, (X,), budget="1GiB", loss_fn=loss_of, search_seconds=0.1)
    assert made.planned is not None
    call = compile_program(other, made.planned.capture, made.program, describe=made.words())
    loss_of(call(X)).backward()
    alive = weakref.ref(other)
    del other, call
    gc.collect()
    assert alive() is None


def test_what_dynamo_compiled_goes_with_the_model() -> None:
    """Its functions are among the globals of memfit, and of a model's file where a graph breaks."""
    before = len(vars(compiled_call))
    for _ in range(2):
        model = whole()
        fit(model)
        loss_of(model(X)).backward()
        del model
        gc.collect()
    assert len(vars(compiled_call)) == before
