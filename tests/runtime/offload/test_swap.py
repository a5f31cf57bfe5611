"""A step that swaps has the bits of the plain one, keeps its budget, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import gc
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.errors import SpecError, SwapError
from memfit.ir.instructions import Compute, Free, SwapIn
from memfit.ir.program import Program
from memfit.planner.offload.model import swappable
from memfit.runtime.offload.disk import DiskSpace
from memfit.sim.simulator import simulate
from memfit.sim.verifier import check
from tests.models import Broken, Residual
from tests.runtime.cases import check_bits_and_budget

pytestmark = pytest.mark.usefixtures("small_disk")

X = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 5
SameStep = Callable[[nn.Module, nn.Module, Callable[[nn.Module], torch.Tensor]], None]


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, Y[: len(output)])


def step(model: nn.Module) -> torch.Tensor:
    return loss_fn(model(X))


class Chain(nn.Module):
    """Of which swapping makes the most: each result waits for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        parts = (
            (nn.Conv2d(n, 8, 3, padding=1, bias=n == 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for n in (3, 8, 8)
        )
        self.parts, self.head = nn.Sequential(*(part for three in parts for part in three)), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts(x).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swap": Chain,
    "hybrid": lambda: Residual(blocks=4),  # with fewer nothing is swapped beside what is recomputed
}


def fitted(strategy: str = "swap") -> tuple[nn.Module, nn.Module]:
    """A fitted model that swaps, and its plain twin."""
    torch.manual_seed(0)
    model = MODELS[strategy]()
    twin = copy.deepcopy(model)
    options: Any = {"tiers": "disk", "search_seconds": 0.1, "strategy": strategy}
    memfit.fit(model, (X,), budget=least_budget(strategy, MODELS[strategy]), loss_fn=loss_fn, **options)
    assert memfit.plan_of(model).program.swapped()
    return model, twin


@functools.cache
def least_budget(strategy: str, make: Callable[[], nn.Module]) -> int:
    """What a strategy needs that swaps all it can."""
    options: Any = {"tiers": "disk", "strategy": strategy, "prove": False}
    with pytest.raises(memfit.BudgetError) as found:
        memfit.plan(make(), (X,), budget="1KiB", loss_fn=loss_fn, **options)
    return found.value.least_bytes


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *(("swap", name) for name in ("residual", "lstm")),
        *(("hybrid", name) for name in ("tied", "broken", "kernels")),
        *(("auto", name) for name in ("layouts", "masked", "unet")),
    ],
)
def test_bits_and_budget(name: str, strategy: str) -> None:
    check_bits_and_budget(name, 0.5, tiers="disk", strategy=strategy)


def test_two_hundred_steps_swapped_and_recomputed_together(same_step: SameStep, spaces: list[DiskSpace]) -> None:
    model, twin = fitted("hybrid")
    program = memfit.plan_of(model).program
    assert program.swapped() and program.recomputed()
    files = [space._file.nbytes for space in spaces]
    for number in range(200):
        if number % 50 == 0:
            twin.load_state_dict(model.state_dict())
            same_step(model, twin, step)
        else:
            model.zero_grad()
            step(model).backward()
        assert all(space.reserved_bytes == 0 for space in spaces)
    twin.load_state_dict(model.state_dict())
    same_step(model, twin, step)
    assert [space._file.nbytes for space in spaces] == files


def test_passes_in_flight_have_their_own_place_and_give_it_back(spaces: list[DiskSpace]) -> None:
    model, twin = fitted()
    for m in (model, twin):
        m.eval()
        m.train()
        first, second = step(m), 2 * step(m)
        second.backward()
        first.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert spaces[-1].reserved_bytes == 0
    for _ in range(5):  # without a backward pass
        output = model(X)
        assert spaces[-1].reserved_bytes > 0
        del output
        gc.collect()
    step(model).backward()
    assert spaces[-1].reserved_bytes == 0
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):  # whose backward pass is compiled by now, for a graph that is not kept
        m.zero_grad()
        loss = step(m)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_tier_that_is_full_says_so_and_the_model_goes_on(spaces: list[DiskSpace], same_step: SameStep) -> None:
    model, twin = fitted()
    spaces[-1]._places._limit_bytes = int(1.5 * spaces[-1]._file.nbytes)
    waiting = step(model)
    before = [b.clone() for b in model.buffers()]
    with pytest.raises(
        SwapError, match=r"more are to be swapped to the disk, which may hold .*backward pass has not run"
    ):
        step(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    waiting.backward()
    assert spaces[-1].reserved_bytes == 0
    twin.load_state_dict(model.state_dict())
    same_step(model, twin, step)


def test_limits_are_kept() -> None:
    model, budget, options = Residual(blocks=2), least_budget("swap", Residual), {"loss_fn": loss_fn, "prove": False}
    free = memfit.plan(model, (X,), budget=budget, tiers="disk", strategy="swap", **options)
    limit = simulate(free.planned.graph, free.program).out_bytes // 2
    budget = int(0.8 * free.predicted.plain_peak_bytes)
    for strategy in ("auto", "swap"):
        plan = memfit.plan(model, (X,), budget=budget, tiers=f"disk:{limit}", strategy=strategy, **options)
        assert simulate(plan.planned.graph, plan.program).out_bytes <= limit


def test_what_is_back_before_the_loss_is_waited_for(same_step: SameStep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = fitted()
    plan = memfit.plan_of(model)
    graph, instructions = plan.planned.graph, list(plan.program.instructions)
    loss = instructions.index(Compute(graph.loss_index))
    early = [i for i in instructions[loss:] if isinstance(i, SwapIn)]
    freed = {i.storage for i in instructions[:loss] if isinstance(i, Free)}
    early = [i for i in early if i.storage in freed]
    assert early
    rest = [i for i in instructions[loss:] if i not in early]
    program = Program(instructions=(*instructions[:loss], *early, *rest))
    check(graph, program)
    replace(plan, program=program, budget_bytes=1 << 30).apply(model)
    read = os.preadv

    def slow(*arguments: Any) -> int:
        time.sleep(0.02)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    same_step(model, twin, step)


def test_a_released_model_closes_its_tiers_and_its_plan_file_swaps(
    spaces: list[DiskSpace], same_step: SameStep, tmp_path: Any
) -> None:
    model, twin = fitted()
    step(twin).backward()
    step(model).backward()
    path = tmp_path / "plan.json"
    memfit.plan_of(model).save(path)
    alive = [weakref.ref(space) for space in spaces]
    assert alive
    memfit.release(model)
    spaces.clear()
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []
    memfit.Plan.load(path).apply(model, loss_fn=loss_fn)
    same_step(model, twin, step)
    assert memfit.plan_of(model).program.swapped()


def test_what_crosses_between_subgraphs_stays() -> None:
    request = Request(budget=1, loss_fn=lambda o: (o**2).mean())
    _, graph = capture_and_profile(Broken(), (torch.randn(256, 16),), {}, request)
    subgraph = {s: op.subgraph for op in graph.ops for s in op.writes}
    crossing = {s for op in graph.ops for s in op.reads if subgraph.get(s, op.subgraph) != op.subgraph}
    assert len(set(subgraph.values())) > 1
    assert swappable(graph) and crossing.isdisjoint(swappable(graph))


def test_subgraphs_share_the_disk(spaces: list[DiskSpace]) -> None:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(256, 16)
    twin = copy.deepcopy(model)
    memfit.fit(model, (x,), budget="1GiB", loss_fn=lambda o: (o**2).mean(), tiers="disk", strategy="swap")
    for m in (model, twin):
        torch.manual_seed(1)
        (m(x) ** 2).mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(space.reserved_bytes == 0 for space in spaces)


@pytest.mark.parametrize("tiers", ["host", "tape", "disk,disk", "disk:much", ""])
def test_tiers_that_make_no_sense(tiers: str) -> None:
    model = Residual(blocks=1)
    with pytest.raises(SpecError, match=r"tiers|disk|budget"):
        memfit.fit(model, (X,), budget="1GiB", loss_fn=loss_fn, tiers=tiers)
    assert model._compiled_call_impl is None


def test_swapping_strategies_need_a_tier() -> None:
    with pytest.raises(SpecError, match="needs a tier to swap to; pass tiers='disk'"):
        memfit.plan(Residual(blocks=1), (X,), budget="1GiB", loss_fn=loss_fn, strategy="swap")
