"""A plan is proved to be the baseline step, and a difference is named."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.allocation_tracker import LiveBytes
from memfit.capture.state.detached_inputs import detached
from memfit.capture.state.snapshot import preserved
from memfit.compiler.proof import ProvingStep


@torch.compiler.assume_constant_result
def seen_by_a_compiler() -> bool:
    """Tells whether Dynamo asks: a way to be another module for a compiler that nobody can keep from a graph."""
    frame: Any = sys._getframe()
    while frame is not None:
        if "symbolic_convert" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class TwoFaced(nn.Module):
    def __init__(self, off: float) -> None:
        super().__init__()
        self.first, self.second, self.off = nn.Linear(8, 8), nn.Linear(8, 4), off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if seen_by_a_compiler():
            x = x * (1.0 + self.off)
        return self.second(x)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_a_plan_says_that_it_was_proved() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4))
    plan = memfit.plan(model, (torch.randn(4, 8),), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    assert plan.proof is not None and plan.proof.is_exact and plan.proof.gradients
    assert "bit by bit" in str(plan)


def test_another_step_is_an_error_that_names_where_they_part() -> None:
    torch.manual_seed(0)
    with pytest.raises(memfit.ExactnessError, match="second") as caught:
        memfit.fit(TwoFaced(0.25), (torch.randn(4, 8),), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    assert 'exact="rounding"' in str(caught.value) and "aten." in str(caught.value)


def test_rounding_is_measured_and_told_where_it_is_allowed() -> None:
    torch.manual_seed(0)
    model, x = TwoFaced(1e-6), torch.randn(4, 8)
    with pytest.raises(memfit.ExactnessError):
        memfit.plan(model, (x,), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    plan = memfit.plan(model, (x,), budget="1GiB", loss_fn=loss, search_seconds=0.1, exact="rounding")
    assert plan.proof is not None and not plan.proof.is_exact
    assert 1e-8 < plan.proof.relative_difference < 1e-4 and "within" in plan.summary()


def test_more_than_rounding_is_refused_all_the_same() -> None:
    torch.manual_seed(0)
    with pytest.raises(memfit.ExactnessError, match="more than rounding"):
        memfit.plan(TwoFaced(0.25), (torch.randn(4, 8),), budget="1GiB", loss_fn=loss, exact="rounding")


def test_a_baseline_step_that_is_never_the_same_is_no_reason_to_refuse() -> None:
    counter = itertools.count(1)  # an iterator cannot be put back

    def fickle(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean() * next(counter)

    model = nn.Linear(8, 4)
    plan = memfit.plan(model, (torch.randn(4, 8),), budget="1GiB", loss_fn=fickle, search_seconds=0.1)
    assert plan.proof is not None and not plan.proof.deterministic


def test_a_forward_pass_alone_saves_nothing_and_sees_gradients_enabled() -> None:
    class Asking(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.is_grad_enabled()
            return super().forward(x)

    model = Asking(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    x = torch.randn(256, 64)
    peaks = []
    with preserved(model, x) as state:
        step = ProvingStep(model=model, inputs=detached((x,), {}), loss_fn=loss, state=state)
        for backward in (True, False):
            with LiveBytes("cpu") as counter:
                result = step.plain(backward=backward)
            peaks.append(counter.peak)
            assert result.has_gradients == backward
    assert peaks[1] < 0.5 * peaks[0]


def test_an_unknown_word_for_exactness() -> None:
    with pytest.raises(memfit.SpecError, match="exact"):
        memfit.plan(nn.Linear(8, 4), (torch.randn(4, 8),), budget="1GiB", exact="nearly")


class Gated(nn.Module):
    """A branch behind a gate that begins at one number."""

    def __init__(self, gate: float, *, checked: bool = False) -> None:
        super().__init__()
        self.first, self.branch, self.checked = nn.Linear(8, 8), TwoFaced(0.25), checked
        self.gate = nn.Parameter(torch.full((4,), gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checked:
            checked(self.gate)
        return self.first(x)[:, :4] + self.gate * self.branch(x)


@torch.compiler.disable
def checked(gate: torch.Tensor) -> None:
    if bool((gate != gate[0]).any()):
        raise ValueError("the gate opens")


@pytest.mark.parametrize("gate", [0.0, 1e-12])
def test_a_branch_behind_a_closed_gate_is_compared_too(gate: float) -> None:
    torch.manual_seed(0)
    model, x = Gated(gate), torch.randn(4, 8)
    version = model.gate._version
    with pytest.raises(memfit.ExactnessError, match="branch"):
        memfit.fit(model, (x,), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    assert torch.equal(model.gate, torch.full((4,), gate)) and model.gate._version == version


def test_a_model_that_checks_its_parameters_is_compared_as_it_is() -> None:
    torch.manual_seed(0)
    plain = Gated(0.0, checked=True)
    plain.branch.off = 0.0
    plan = memfit.plan(plain, (torch.randn(4, 8),), budget="1GiB", loss_fn=loss, search_seconds=0.1)
    assert plan.proof is not None and plan.proof.is_exact


@pytest.mark.smoke
def test_casts_that_autocast_keeps_are_not_of_moved_parameters(told: list[str]) -> None:
    """Inside a region they would outlive the proof: the caller's code would read them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.PReLU(16), nn.Linear(16, 16))
    nn.init.zeros_(model[0].bias)
    x = torch.randn(8, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        memfit.fit(model, (x,), budget="1GiB", loss_fn=loss, search_seconds=0.1)
        assert torch.equal(model.forward(x), before)
        assert torch.equal(model(x), before)
    assert not told


WAYS: list[str] = []
"""What `ForksOnABias` took; it is global since what a module can reach is put back after planning."""

note_way = torch.compiler.disable(WAYS.append)


class ForksOnABias(nn.Module):
    """Takes another way once its bias is not zero, and notes the ways it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(16))
        self.narrow, self.wide = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        moved = hidden + self.bias
        if (moved - hidden).abs().sum() == 0:
            note_way("narrow")
            return self.narrow(moved) * 2
        note_way("wide")
        return self.wide(moved)


def test_the_planned_way_is_proved_and_measured_where_moved_parameters_take_another() -> None:
    torch.manual_seed(0)
    WAYS.clear()
    model, x = ForksOnABias(), torch.randn(4, 16)
    plan = memfit.plan(model, (x,), budget=2**20, search_seconds=0.2)
    assert plan.planned is not None and len(plan.planned.capture.subgraphs.subgraphs) > 1
    assert WAYS[-5:] == ["wide", "wide", "narrow", "narrow", "narrow"]  # both plain and planned; then it is measured
    assert plan.proof is not None and plan.proof.is_exact
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.predicted.peak_bytes + 256
