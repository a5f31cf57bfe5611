"""Plans of a step run what Dynamo compiled when the step was captured, for the module that was captured only."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memfit
from memfit.capture.training_step import capture_step
from memfit.compiler.driver import make_plan
from memfit.compiler.request import Request
from memfit.ir.program import baseline_order, program_of
from memfit.runtime.executable import compile_program

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def graphs_so_far() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_code_is_followed_once_for_all_plans_of_a_step() -> None:
    model, plain = made(), made()
    budget = int(0.9 * memfit.estimate(model, (X,), loss_fn=square).peak)
    before = graphs_so_far()
    memfit.fit(model, (X,), budget=budget, loss_fn=square, search_seconds=0.1)
    assert graphs_so_far() == before + 1
    for module in (model, plain):
        square(module(X)).backward()
    assert graphs_so_far() == before + 1
    assert_same_gradients(model, plain)


def test_code_that_changed_is_followed_anew_before_it_runs() -> None:
    model, plain = made(), made()
    memfit.fit(model, (X,), budget="1GiB", loss_fn=square)
    for module in (model, plain):
        module[1] = nn.Sequential(nn.Tanh(), nn.Linear(8, 8, bias=False))
        torch.manual_seed(1)
        nn.init.normal_(module[1][1].weight)
        square(module(X)).backward()
    assert_same_gradients(model, plain)


def test_a_copy_runs_its_own_code() -> None:
    model = made()
    planned = memfit.plan_of(memfit.fit(model, (X,), budget="1GiB", loss_fn=square))
    assert planned is not None and planned.planned is not None
    capture = planned.planned.capture
    assert capture.subgraphs.call is not None
    other, plain = copy.deepcopy(model), made()
    with torch.no_grad():
        for module in (other, plain):
            for parameter in module.parameters():
                parameter.mul_(2)
    square(compile_program(other, capture, planned.program)(X)).backward()
    square(plain(X)).backward()
    assert_same_gradients(other, plain)
    assert all(p.grad is None for p in model.parameters())
    assert copy.deepcopy(capture.subgraphs.call) is capture.subgraphs.call


def test_a_graph_that_is_not_that_of_the_plan_is_told() -> None:
    model, deeper = made(), nn.Sequential(*made(), nn.Tanh())
    captures = [capture_step(module, (X,), {}, loss_fn=square) for module in (model, deeper)]
    mixed = replace(captures[1], subgraphs=replace(captures[1].subgraphs, call=captures[0].subgraphs.call))
    call = compile_program(model, mixed, program_of(mixed.graph, baseline_order(mixed.graph)))
    with pytest.raises(memfit.PlanMismatchError):
        call(X)


class Counting(nn.Module):
    """Counts its calls, and later breaks its graph and reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.read = nn.Linear(8, 8), 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.read:
            torch._dynamo.graph_break()
            return self.layer(x) * x.mean().item()
        return self.layer(x)


def test_a_number_behind_a_break_runs_no_code_twice() -> None:
    torch.manual_seed(0)
    model = Counting()
    capture = capture_step(model, (X,), {}, loss_fn=square)
    anew = replace(capture, subgraphs=replace(capture.subgraphs, call=None))
    call, plain = compile_program(model, anew, program_of(anew.graph, baseline_order(anew.graph))), copy.deepcopy(model)
    model.read = plain.read = True
    before = model.calls, plain.calls
    assert torch.equal(call(X), plain(X))
    assert (model.calls - before[0], plain.calls - before[1]) == (1, 1)


def test_a_plan_that_is_kept_keeps_no_module() -> None:
    model = made()
    plan = make_plan(model, (X,), {}, Request(budget="1GiB", loss_fn=square, prove=False))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and plan.planned is not None
