"""Modules that are fitted without inputs, and steps that run without a plan because the baseline step fits."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.capture.state.input_signature import is_larger
from memfit.compiler.request import Request
from memfit.fitted import plain_steps
from memfit.fitted.installation import fitted_call
from memfit.fitted.plain_steps import PlainStep, PlainSteps
from memfit.profiling.baseline_peak import counted_step
from memfit.profiling.memory import allocation_peak


@pytest.fixture(autouse=True)
def plain_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of the tests."""
    monkeypatch.delenv("MEMFIT_PLAN")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        made: Tensor = self.head(x)
        return made


def batch(step: int, rows: int = 512) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(rows, 128), torch.randint(0, 10, (rows,))


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


Prepare = Callable[[nn.Module, torch.optim.Optimizer], object]


def trained(prepare: Prepare, rows: tuple[int, ...] = (512, 512, 512)) -> nn.Module:
    """The model after a loop of the user, with its loss outside of the model."""
    model, optimizer = net()
    prepare(model, optimizer)
    for step, count in enumerate(rows):
        x, y = batch(step, count)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_without_inputs_it_is_planned_at_its_first_training_call() -> None:
    def lazily(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert memfit.fit(model, budget="5.5MiB", optimizer=optimizer, search_seconds=0.1) is model
        with pytest.raises(memfit.MemfitError, match="Net is not planned yet: that happens at its first training call"):
            memfit.plan_of(model)
        with torch.no_grad():
            model(batch(0)[0])
        model.eval()
        model(batch(0)[0])
        model.train()
        assert not fitted_call(model).plans

    model = trained(lazily)
    assert_same(model, trained(lambda *_: None))
    plan = memfit.plan_of(model)
    assert not plan.is_plain and plan.program.recomputed() and plan.fits


def test_without_an_optimizer_the_one_that_trains_is_found_at_the_first_call() -> None:
    def lazily(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        memfit.fit(model, budget="1GiB")

    def without(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        memfit.fit(model, budget="1GiB", optimizer=0)

    found, none = (memfit.plan_of(trained(prepare)).predicted.peak_bytes for prepare in (lazily, without))
    model, _ = net()
    assert found - none >= sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("way", ["model.forward(x)", "model.eval()", "model(x)"])
def test_a_model_that_is_trained_without_its_call_is_told(way: str, told: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    memfit.fit(model, budget="1GiB", optimizer=optimizer)
    for _ in range(2):
        if way == "model.eval()":
            model.eval()
        output = model.forward(torch.ones(2, 8)) if way == "model.forward(x)" else model(torch.ones(2, 8))
        output.sum().backward()
        optimizer.step()
    warnings = [line for line in told if "without a call of the module in training mode" in line]
    assert len(warnings) == (way != "model(x)")


def test_a_step_that_fits_runs_without_a_plan() -> None:
    def lazily(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        memfit.fit(model, budget="1GiB", optimizer=optimizer)

    model = trained(lazily)
    assert_same(model, trained(lambda *_: None))
    plan = memfit.plan_of(model)
    assert plan.is_plain and plan.fits and not fitted_call(model).plans
    assert plan.summary().startswith("Fits without a plan: at most ") and "of 1.00 GiB; Net runs as it is." in str(plan)
    with pytest.raises(memfit.MemfitError, match="plain=False plans it"):
        plan.save("plan.json")


def test_the_predicted_peak_is_that_of_the_step() -> None:
    model, optimizer = net()
    x, y = batch(0)
    there = sum(p.nbytes for p in model.parameters()) + x.nbytes

    def step() -> None:
        output = model(x)
        F.cross_entropy(output, y).backward()

    peak = allocation_peak(step) + there + 2 * sum(p.nbytes for p in model.parameters())
    model.zero_grad()
    for budget, rel in ((int(peak * 1.04), 0.02), (1 << 30, 1.0)):  # far below the budget, a bound will do
        memfit.fit(model, (x,), budget=budget, loss_fn=lambda out: F.cross_entropy(out, y), optimizer=optimizer)
        plan = memfit.plan_of(model)
        assert plan.is_plain and peak * 0.98 <= plan.predicted.peak_bytes <= peak * (1 + rel)


def test_with_a_budget_just_below_it_is_planned() -> None:
    x, y = batch(0)
    model, optimizer = net()
    step: tuple[Any, ...] = (model, (x,), {})

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    def request(budget: int) -> Request:
        return Request(budget=budget, loss_fn=loss, optimizer=optimizer)

    def fitted(budget: int) -> memfit.Plan:
        memfit.fit(model, (x,), budget=budget, loss_fn=loss, optimizer=optimizer, search_seconds=0.1)
        return memfit.plan_of(model)

    low, high = 1 << 20, 1 << 30
    while high - low > 1 << 12:
        middle = (low + high) // 2
        low, high = (low, middle) if plain_steps.predicted(*step, request(middle)) else (middle, high)
    plan = fitted(high)
    assert plan.is_plain and plan.predicted.peak_bytes * 1.02 <= high <= plan.predicted.peak_bytes * 1.021
    plan = fitted(low)
    assert not plan.is_plain and plan.fits


def test_it_can_be_planned_where_it_fits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = net()
    memfit.fit(model, (batch(0)[0],), budget="1GiB", plain=False)
    assert not memfit.plan_of(model).is_plain
    monkeypatch.setenv("MEMFIT_PLAN", "always")
    other, _ = net()
    memfit.fit(other, (batch(0)[0],), budget="1GiB")
    assert not memfit.plan_of(other).is_plain


def test_smaller_inputs_than_those_that_fit_need_no_count() -> None:
    rows = (512, 40, 511, 3, 512, 600)
    model = trained(lambda m, o: memfit.fit(m, budget="1GiB", optimizer=o), rows)
    steps = fitted_call(model).fitting.known.values()
    assert len(steps) == 5 and len({id(step) for step in steps}) == 2  # counted for 512 and 600 rows
    assert_same(model, trained(lambda *_: None, rows))


def test_small_steps_run_plainly_and_large_ones_by_a_plan() -> None:
    rows = (64, 512, 32, 512)
    model = trained(lambda m, o: memfit.fit(m, budget="5.5MiB", optimizer=o, search_seconds=0.1), rows)
    assert_same(model, trained(lambda *_: None, rows))
    call = fitted_call(model)
    assert len(call.plans) == 1 and len(call.fitting.known) == 2


def test_an_input_that_other_code_computed_is_counted_too() -> None:
    encoder, (model, _) = nn.Linear(128, 128), net()
    memfit.fit(model, budget="1GiB")
    model(encoder(batch(0)[0])).sum().backward()
    assert memfit.plan_of(model).is_plain and encoder.weight.grad is not None


class Looking(nn.Module):
    """Takes as many rows as the first number of its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, count: Tensor, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.repeat(int(count[0]), 1)).sum()
        return made


def test_a_module_that_looks_at_values_is_watched_in_each_step() -> None:
    model = memfit.fit(Looking(), budget="1GiB")
    for rows in (1, 2, 3, 4):
        model(torch.tensor([rows]), torch.ones(2, 4)).backward()
        assert fitted_call(model).fitting.watch is not None
    model = memfit.fit(net()[0], budget="1GiB")
    for _ in range(4):
        model(batch(0)[0]).sum().backward()
    assert fitted_call(model).fitting.watch is None


class Both(nn.Module):
    """Returns what it made and a penalty; the loop adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.net(x)
        return made, made.square().mean()


def test_the_only_scalar_is_a_guess_that_the_loop_may_prove_wrong(told: Any) -> None:
    def steps(model: nn.Module) -> nn.Module:
        for step in range(3):
            x, y = batch(step)
            made, penalty = model(x)
            (F.cross_entropy(made, y) + penalty).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return model

    torch.manual_seed(0)
    model = Both()
    plain = copy.deepcopy(model)
    assert_same(steps(memfit.fit(model, budget="4MiB", search_seconds=0.1)), steps(plain))
    assert not memfit.plan_of(model).is_plain
    assert any("a gradient arrived for an output that the loss given to memfit does not use" in line for line in told)


@pytest.mark.parametrize("part", ["compiled", "higher order"])
def test_a_module_with_such_a_part_is_counted(part: str) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.run = torch.compile(torch.tanh, backend="eager") if part == "compiled" else self.conditional

        def conditional(self, x: Tensor) -> Any:
            return torch.cond(x.shape[0] > 1, lambda t: self.inner(t), lambda t: t + 1, (x,))

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x).sum()

    model = Inner()
    assert counted_step(model, (torch.ones(4, 8),), {}, None, "cpu", workspaces=False) is not None


def test_the_class_and_the_object_stay() -> None:
    model: Net = Net()
    fitted: Net = memfit.fit(model, budget="1GiB")
    assert fitted is model and type(fitted) is Net
    assert memfit.release(fitted) is model


GREEDY = """
import logging
logging.basicConfig(format="%(message)s")
import torch, memfit
from tests.fitted.test_plain_steps import batch, net
from memfit.fitted.installation import fitted_call
model, _ = net()
memfit.fit(model, budget=128 << 20, search_seconds=0.1)
for step in range(3):
    model(batch(step)[0]).repeat(1, 4_000).tanh().square().mean().backward()
assert fitted_call(model).plans
"""
"""A loss outside of the module that takes more than the whole module."""


def test_a_step_that_took_more_than_its_budget_is_planned_from_then_on() -> None:
    """In a process of its own: the peak of a process counts all that it did before."""
    environment = {name: value for name, value in os.environ.items() if name != "MEMFIT_PLAN"}
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "in a step without a plan, more than predicted and more than its budget" in done.stderr


def test_a_signature_covers_smaller_ones_only() -> None:
    steps = PlainSteps()
    entry = lambda *shape: (torch.Size(shape), torch.float32)  # noqa: E731
    known = PlainStep(label="", budget_bytes=1, predicted_bytes=1, is_bound=False, there_bytes=0, reads_values=False)
    steps.known[(entry(4, 8), "mode")] = known

    def covered(key: Any) -> bool:
        return any(is_larger(one, key) for one in steps.known)

    assert covered((entry(4, 7), "mode")) and covered((entry(4, 8), "mode"))
    for key in ((entry(4, 9), "mode"), (entry(4, 8), "other"), (entry(4), "mode"), (entry(4, 8),)):
        assert not covered(key)
    assert not covered(((torch.Size((4, 8)), torch.float64), "mode"))


def test_wrong_budgets_are_refused_at_once() -> None:
    with pytest.raises(memfit.SpecError):
        memfit.fit(Net(), budget="many")
    with pytest.raises(memfit.SpecError, match=r"pass \(x,\)"):
        memfit.fit(Net(), batch(0)[0], budget="1GiB")  # type: ignore[arg-type]


def test_a_gradient_of_zeros_for_an_unused_output_is_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hinge that is satisfied sends zeros, and optimizers decay weights whose gradient is zeros, not None."""
    monkeypatch.setenv("MEMFIT_PLAN", "always")

    class Scored(Net):
        def forward(self, x: Tensor) -> Any:
            made = super().forward(x)
            return made, made.detach().mean() + self.layers[0].weight.mean()  # one scalar: taken for the loss

    torch.manual_seed(0)
    plain = Scored()
    fitted = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (plain, fitted)]
    memfit.fit(fitted, budget="50MiB", optimizer=optimizers[1])
    for step in range(3):
        x, _ = batch(step)
        for one, optimizer in zip((plain, fitted), optimizers, strict=True):
            output, _ = one(x)
            F.relu(output.mean() - 100).backward()
            assert all(p.grad is not None for p in one.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fitted.parameters(), strict=True))
