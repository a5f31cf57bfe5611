"""Weights' gradients of concatenations are made operand by operand where that changes no bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.training_step import Capture
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.ir.graph import Phase, StepGraph
from memfit.passes.concat_weight_gradients import separable_key
from memfit.sim.simulator import simulate_baseline
from memfit.tools.verify import verify

CHANNELS = 16


class Joined(nn.Module):
    """A convolution of a concatenation, as after the long skip of a U-Net or the branches of an Inception block."""

    def __init__(self, *, branches: int = 2, bias: bool = True, groups: int = 1, kernel: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
            for _ in range(branches)
        )
        joined = branches * CHANNELS
        self.join = nn.Conv2d(joined, 8, kernel, padding=kernel // 2, bias=bias, groups=groups)
        self.last = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.join(torch.cat([branch(x) for branch in self.branches], dim=1)))


class Returned(Joined):
    """The caller gets an operand, and may overwrite it before the backward pass."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        parts = [branch(x).clone() for branch in self.branches]
        return self.last(self.join(torch.cat(parts, dim=1))), parts[0].detach()


class OfInput(Joined):
    """An operand is the caller's input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.join(torch.cat([self.branches[0](x[:, :3]), x], dim=1)))


def loss_fn(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output[0]).square().mean()


def captured(model: nn.Module, x: torch.Tensor) -> tuple[Capture, StepGraph]:
    return capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))


def reads_concatenation(graph: StepGraph) -> bool:
    made = {s for op in graph.ops if op.target == "aten.cat.default" and op.phase is Phase.FORWARD for s in op.writes}
    return any(made.intersection(op.reads) for op in graph.ops if op.phase is Phase.BACKWARD)


@pytest.mark.smoke
@pytest.mark.parametrize(("branches", "bias", "share"), [(2, True, 0.5), (3, False, 0.95)])
def test_same_bits_and_budget(branches: int, bias: bool, share: float) -> None:
    torch.manual_seed(0)
    model, x = Joined(branches=branches, bias=bias), torch.randn(4, 3, 48, 48)
    capture, graph = captured(model, x)
    assert capture.separated
    assert not reads_concatenation(graph)
    plan = functools.partial(plan_captured, model, (x,), {}, capture, graph, Request(budget=1, loss_fn=loss_fn))
    try:
        planned = plan(int(share * simulate_baseline(graph).peak_bytes))
    except memfit.BudgetError as error:
        planned = plan(error.least_bytes)
    result = verify(model, (x,), {}, planned)
    assert not result.differing
    assert result.peak_bytes <= result.plan.budget_bytes


def test_the_baseline_step_makes_it_whole_and_takes_as_much_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Joined(), torch.randn(4, 3, 64, 64)
    capture, graph = captured(model, x)
    assert graph.baseline is not None
    made = [op for op in graph.ops if op.target == "aten.convolution_backward.default"]
    whole_ones = [op for op in graph.baseline.ops if op.target == "aten.convolution_backward.default"]
    assert len(whole_ones) == len(made) - 1 and all(op.seconds > 0.0 for op in whole_ones)
    monkeypatch.setattr("memfit.profiling.profiler._separable_keys", lambda *_: frozenset())
    capture, whole = captured(model, x)
    assert not capture.separated
    assert simulate_baseline(graph).peak_bytes == pytest.approx(simulate_baseline(whole).peak_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "channels"), [(Returned(), 3), (OfInput(), CHANNELS), (Joined(groups=2), 3)], ids=["out", "in", "groups"]
)
def test_what_is_left_whole(model: nn.Module, channels: int) -> None:
    capture, graph = captured(model, torch.randn(4, channels, 32, 32))
    assert not capture.separated
    assert reads_concatenation(graph)


class Mixed(Joined):
    """One operand is laid out otherwise than the other, or begins inside the memory of another tensor."""

    def __init__(self, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.join(torch.cat([self.branches[0](x), self.other(self.branches[1](x))], dim=1)))


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).contiguous(memory_format=torch.channels_last)


def test_the_verdict_belongs_to_the_layout_of_the_operands() -> None:
    x = torch.randn(4, 3, 48, 48)
    graphs = [captured(Mixed(other), x)[0].subgraphs.subgraphs[0].reading for other in (lambda t: t + 1, channels_last)]
    keys = [{*reading.separated, *map(separable_key, reading.separable)} for reading in graphs]
    assert len(keys[0]) == len(keys[1]) == 1
    assert keys[0] != keys[1]


def inside(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, 2, 1, 1).split(CHANNELS, 1)[1]


@pytest.mark.parametrize(("other", "batch"), [(channels_last, 4), (inside, 1), (inside, 4)])
def test_same_bits_however_operands_lie(other: Callable[[torch.Tensor], torch.Tensor], batch: int) -> None:
    torch.manual_seed(0)
    model, x = Mixed(other), torch.randn(batch, 3, 33, 31)
    assert not verify(model, (x,), {}, Request(budget="1GiB", loss_fn=loss_fn, prove=False)).differing


def test_what_begins_inside_other_memory_is_left_whole() -> None:
    capture, _ = captured(Mixed(inside), torch.randn(4, 3, 48, 48))
    assert not capture.separated and not capture.subgraphs.subgraphs[0].reading.separable


def test_the_caller_may_overwrite_what_he_got() -> None:
    torch.manual_seed(0)
    model, x = Returned(), torch.randn(4, 3, 32, 32)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        output, part = model(x)
        part.zero_()
        loss_fn(output).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    memfit.fit(model, (x,), budget="1GiB", loss_fn=loss_fn)
    assert all(map(torch.equal, expected, gradients()))


def test_parts_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("memfit.profiling.profiler.whole_if_separable", lambda *_: ())
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    model, x = Joined(), torch.randn(4, 3, 40, 40)
    capture, graph = captured(model, x)
    assert not capture.separated
    assert reads_concatenation(graph)
    assert not verify(model, (x,), {}, Request(budget="1GiB", loss_fn=loss_fn, prove=False)).differing


def test_a_plan_from_a_file_runs(tmp_path: Path) -> None:
    model, x = Joined(), torch.randn(4, 3, 32, 32)
    memfit.plan(model, (x,), budget="1GiB", loss_fn=loss_fn).save(tmp_path / "plan.json")
    memfit.Plan.load(tmp_path / "plan.json").apply(model, loss_fn=loss_fn)
    loss_fn(model(x)).backward()
    assert model.join.weight.grad is not None
