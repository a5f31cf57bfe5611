"""Steps whose storages live on a tier: the gradients of the baseline step, in less memory than whole storages take."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

import memfit
from memfit.compiler.driver import make_plan
from memfit.compiler.proving import prove
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.errors import SwapError
from memfit.fitted.plan import Plan
from memfit.ir.graph import StepGraph
from memfit.ir.instructions import TierResident
from memfit.ir.program import Program, baseline_order, program_of
from memfit.ir.streaming import streamable, streaming_step
from memfit.ir.tiers import Tier
from memfit.runtime.executable import compile_program
from memfit.runtime.offload.disk import DiskSpace
from memfit.sim.verifier import check
from memfit.tools.verify import verify
from memfit.zoo import build

pytestmark = pytest.mark.usefixtures("small_disk")

DEVICE = torch.device("cpu")


class Turned(nn.Module):
    """Between its convolutions channels are outermost in memory, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.first(x).transpose(0, 1).contiguous().transpose(0, 1)
        return self.last(turned.sigmoid().relu() * 2)


class Normalised(nn.Module):
    """Residual blocks with batch normalisation, whose gradients wait for each other whole."""

    def __init__(self, width: int = 16, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = (x + norm(convolution(x))).relu()
        return self.head(x.mean((2, 3)))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def images(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return Normalised().to(dtype), (torch.randn(6, 3, 32, 32, dtype=dtype),), {}, loss_fn


def spec(name: str, batch: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    example = build(name, batch=batch, shape=shape, device=DEVICE)
    return example.model, example.args, example.kwargs, example.loss_fn


Planner = Callable[[int], Plan]
"""Plans a captured step for a budget."""


def captured(case: tuple[Any, ...], grid: tuple[int, ...]) -> tuple[Planner, Planner]:
    """Plans a step without tiers, and with a disk, as it was captured once."""
    model, args, kwargs, loss = case
    request = Request(budget=1, loss_fn=loss, levers="all", tiers="disk", search_seconds=0.1)
    capture, graph = capture_and_profile(model, args, kwargs, request, grid=grid)

    def planned(budget: int, *, graph: StepGraph) -> Plan:
        return plan_captured(model, args, kwargs, capture, graph, replace(request, budget=budget), budget)

    without = structs.replace(graph, tiers=())
    return functools.partial(planned, graph=without), functools.partial(planned, graph=graph)


def least_bytes(planned: Planner) -> int:
    with pytest.raises(memfit.BudgetError) as failure:
        planned(1)
    return failure.value.least_bytes


def gradients(case: tuple[Any, ...], call: Callable[..., Any]) -> dict[str, torch.Tensor]:
    model, args, kwargs, loss = case
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = call(*args, **kwargs)
    (output if loss is None else loss(output)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def far_apart(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], tolerance: float) -> list[str]:
    """Names of gradients that differ by more than a share of all of them."""
    scale = torch.stack([g.norm() for g in expected.values()]).norm()
    return [n for n, g in expected.items() if (g - found[n]).norm() > tolerance * scale]


def test_less_memory_and_the_same_gradients_in_tiles() -> None:
    case = images()
    in_memory, on_disk = captured(case, (2, 2))
    least = least_bytes(on_disk)
    assert least < 0.9 * least_bytes(in_memory)
    plan = prove(*case[:3], on_disk(least))
    assert plan.program.tier_resident() and plan.measured_peak_bytes <= least
    assert plan.measured_peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.03)
    assert plan.planned is not None
    call = compile_program(case[0], plan.planned.capture, plan.program)
    state = copy.deepcopy(case[0].state_dict())
    found = gradients(case, call)
    assert call.moved_bytes == (plan.predicted.out_bytes, plan.predicted.in_bytes)
    buffers = {n: b.double() for n, b in case[0].named_buffers()}
    case[0].load_state_dict(state)
    assert far_apart(gradients(case, case[0]), found, 1e-5) == []
    expected = {n: b.double() for n, b in case[0].named_buffers()}
    assert not expected or far_apart(expected, buffers, 1e-5) == []


def turned(batch: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return Turned(), (torch.randn(batch, 3, 64, 64),), {}, loss_fn


EVERYTHING: dict[str, tuple[Callable[[], tuple[Any, ...]], tuple[int, ...], float]] = {
    "float64": (lambda: images(torch.float64), (1, 1), 1e-13),
    "gpt": (lambda: spec("zoo:gpt?layers=1&width=64&heads=4&dropout=0.1", 8, (64,)), (1, 1), 1e-5),
    "unet": (lambda: spec("zoo:unet?width=8&depth=1", 6, (3, 32, 32)), (1, 1), 1e-5),
    # Channels that the number of samples divides, and such that it does not.
    "turned": (lambda: turned(4), (2, 2), 1e-5),
    "turned, other samples": (lambda: turned(3), (2, 2), 1e-5),
}
"""Steps, grids, and by what share of all gradients each may differ."""


@pytest.mark.parametrize("name", EVERYTHING)
def test_whatever_streams_the_gradients_are_the_same(name: str) -> None:
    make, grid, tolerance = EVERYTHING[name]
    case = make()
    model, args, kwargs, loss = case
    request = Request(budget="1GiB", loss_fn=loss, levers="all", tiers="disk")
    capture, graph = capture_and_profile(model, args, kwargs, request, grid=grid)
    placed = dict.fromkeys(streamable(graph, least_bytes=1 << 12), Tier.DISK)
    names = tuple(TierResident(s, tier) for s, tier in placed.items())
    alone = program_of(streaming_step(graph, placed), baseline_order(graph), fuse=False)
    program = Program(instructions=(*names, *alone.instructions))
    check(graph, program)
    assert len(placed) > 5
    found = gradients(case, compile_program(model, capture, program))
    assert far_apart(gradients(case, model), found, tolerance) == []


def test_a_fitted_model_goes_on_and_leaves_nothing(spaces: list[DiskSpace], tmp_path: Any) -> None:
    case = images()
    model, args, _, _ = case
    twin = copy.deepcopy(model)
    planned = captured(case, (1, 1, 6))[1]
    plan = planned(least_bytes(planned))
    assert plan.program.tier_resident()
    path = tmp_path / "plan.json"
    plan.save(path)
    fitted = Plan.load(path).apply(model, loss_fn=loss_fn)
    assert memfit.plan_of(fitted).program.tier_resident() == plan.program.tier_resident()

    def step(m: nn.Module, times: int = 1) -> dict[str, torch.Tensor]:
        m.zero_grad()
        loss = loss_fn(m(*args))
        for _ in range(times):
            loss.backward(retain_graph=times > 1)
        return {name: p.grad.clone() for name, p in m.named_parameters()}

    for times in (1, 2, 1):  # the second time the graph is kept
        assert far_apart(step(twin, times), step(fitted, times), 1e-5) == []
    fitted.zero_grad()
    waiting = fitted(*args)  # and one step whose backward pass never runs
    assert spaces[-1].reserved_bytes > 0
    del waiting
    gc.collect()
    assert far_apart(step(twin), step(fitted), 1e-5) == []
    assert all(space.reserved_bytes == 0 for space in spaces)
    for m in (fitted, twin):  # two steps in flight together
        m.zero_grad()
        first, second = loss_fn(m(*args)), 2 * loss_fn(m(*args))
        second.backward()
        first.backward()
    expected = {name: p.grad for name, p in twin.named_parameters()}
    assert far_apart(expected, {name: p.grad for name, p in fitted.named_parameters()}, 1e-5) == []
    assert all(space.reserved_bytes == 0 for space in spaces)


def test_a_disk_that_fails_takes_the_step_and_nothing_else(
    spaces: list[DiskSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args, kwargs, loss = images()
    request = Request(budget="1GiB", loss_fn=loss, levers="all", tiers="disk")
    capture, graph = capture_and_profile(model, args, kwargs, request, grid=(1, 1, 6))
    placed = dict.fromkeys(streamable(graph), Tier.DISK)
    names = tuple(TierResident(s, tier) for s, tier in placed.items())
    alone = program_of(streaming_step(graph, placed), baseline_order(graph))
    planned_call = compile_program(model, capture, Program(instructions=(*names, *alone.instructions)))
    state = copy.deepcopy(model.state_dict())
    expected = gradients((model, args, kwargs, loss), planned_call)
    for name, after in (("preadv", 3), ("preadv", 30), ("pwrite", 3), ("pwrite", 20)):
        model.load_state_dict(state)
        with monkeypatch.context() as broken:
            broken.setattr(os, name, failing(getattr(os, name), after))
            with pytest.raises(SwapError, match="the disk is broken"):
                gradients((model, args, kwargs, loss), planned_call)
        gc.collect()
        model.load_state_dict(state)
        found = gradients((model, args, kwargs, loss), planned_call)
        assert far_apart(expected, found, 1e-6) == []
        assert all(space.reserved_bytes == 0 for space in spaces)


def failing(real: Callable[..., int], after: int) -> Callable[..., int]:
    """A system call that fails once it was called so often."""
    calls = itertools.count()

    def call(*arguments: Any) -> int:
        if next(calls) >= after:
            raise OSError(errno.EIO, "the disk is broken")
        return real(*arguments)

    return call


def test_the_whole_road_and_its_proof_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.compiler.driver.grids", lambda *_: [(1, 1, 6)])
    model, args, kwargs, loss = images()
    request = Request(budget=1000, loss_fn=loss, levers="all", tiers="disk", search_seconds=0.1)
    with pytest.raises(memfit.BudgetError) as failure:
        make_plan(model, args, kwargs, replace(request, prove=False))
    request = replace(request, budget=failure.value.least_bytes)
    result = verify(model, args, kwargs, request, loss_fn=loss)
    assert result.differing == ()
    assert result.plan.program.tier_resident() and result.peak_bytes <= request.budget
    assert result.peak_bytes == pytest.approx(result.plan.predicted.peak_bytes, rel=0.03)
    assert result.recomputes_executed == result.recomputes_planned
    assert result.swapped_executed_bytes == result.swapped_planned_bytes != (0, 0)
