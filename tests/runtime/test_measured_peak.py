"""What is measured of a step is what it takes in a loop, whatever ran before in the same region of autocast."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import memfit
from memfit.profiling.memory import measure


class Recurrent(nn.Module):
    """Code between planned subgraphs whose weights autocast casts, and a norm whose parameters the proof moves."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(16, 64), nn.LayerNorm(64)
        self.cell, self.out = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.into(x)))
        torch._dynamo.graph_break()
        x = self.recurred(x)
        return self.out(torch.tanh(x))

    @torch.compiler.disable
    def recurred(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[0])
        for row in x:
            state = torch.tanh(self.cell(state) + row)
        return state


def test_casts_of_weights_count_each_time() -> None:
    layer, x = nn.Linear(256, 256), torch.randn(4, 256)

    def step() -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    def step_in_its_own_region() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step()

    expected = measure(step_in_its_own_region, repeats=0, start_bytes=0).peak_bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [measure(step, repeats=0, start_bytes=0).peak_bytes for _ in range(2)] == [expected] * 2


def test_the_least_budget_is_that_of_a_step_in_the_callers_autocast() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(6, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            memfit.fit(model, (x,), budget=1, loss_fn=lambda output: output.float().square().mean())
        except memfit.BudgetError as error:
            least_bytes = error.least_bytes
        memfit.fit(model, (x,), budget=least_bytes, loss_fn=lambda output: output.float().square().mean())
    plan = memfit.plan_of(model)
    assert plan is not None and plan.measured_peak_bytes is not None and plan.measured_peak_bytes <= least_bytes


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * torch.rand_like(x))


def test_the_generators_state_counts_while_random_ops_are_replayed() -> None:
    """5056 bytes are put aside beside those that are kept, more than any tensor of this step takes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), *(Noisy() for _ in range(4))), torch.randn(4, 8)
    plan = memfit.plan(
        model, (x,), budget="1MiB", loss_fn=lambda output: output.square().mean(), strategy="every-block"
    )
    assert plan.planned is not None
    random = [i for i in plan.program.recomputed() if plan.planned.graph.ops[i].random_state_bytes]
    assert len(random) == 4
    assert plan.predicted.peak_bytes > 5 * 5056
    assert plan.measured_peak_bytes == plan.predicted.peak_bytes


class Disturbed(nn.Module):
    """A step beside which something else takes memory in one of its runs; nothing of memfit's counts or undoes that."""

    def __init__(self, disturbed_run: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.runs, self.disturbed_run = itertools.count(1), disturbed_run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
        return self.seen(x)

    @torch.compiler.disable
    def seen(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(1 << 20).sum() if next(self.runs) == self.disturbed_run else x + 0.0


def test_a_peak_above_the_budget_is_measured_once_more() -> None:
    def planned(budget: int, disturbed_run: int = 0) -> tuple[memfit.Plan, int]:
        torch.manual_seed(0)
        model = Disturbed(disturbed_run)
        memfit.fit(model, (torch.randn(256, 64),), budget=budget, loss_fn=lambda output: output.square().mean())
        plan = memfit.plan_of(model)
        assert plan is not None
        return plan, next(model.runs) - 1

    plenty, last_run = planned(1 << 30)
    assert plenty.measured_peak_bytes is not None and not plenty.program.recomputed()
    budget = plenty.predicted.peak_bytes + 4096
    undisturbed, _ = planned(budget)
    disturbed, runs = planned(budget, last_run)
    assert runs > last_run  # it was measured again
    assert disturbed.program == undisturbed.program and not disturbed.program.recomputed()
    assert disturbed.measured_peak_bytes == undisturbed.measured_peak_bytes
