"""A step is traced once: the plans of a capture begin with the joint graph that it kept."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import compilation_time_metrics

import memfit
from memfit.capture.dynamo.kept_trace import _with_own_containers
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.planner.bounds.lower_bound import widest_op_bytes
from memfit.profiling.memory import allocation_peak
from memfit.runtime.executable import PlannedCall, compile_program
from memfit.sim.simulator import simulate_baseline

_TRACED, _FOLLOWED = "aot_trace_joint_graph", "_compile.compile_inner"  # torch times each by these names


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32)) for _ in range(2)]
    return nn.Sequential(*blocks)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def _traced() -> int:
    return len(compilation_time_metrics.get(_TRACED, ()))


def _followed() -> int:
    return len(compilation_time_metrics.get(_FOLLOWED, ()))


def _step(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    _loss(model(inputs)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.smoke
def test_a_step_that_is_fitted_is_traced_once() -> None:
    model, inputs = _model(), torch.randn(256, 32)
    expected = _step(copy.deepcopy(model), inputs)
    peak = memfit.estimate(model, (inputs,), loss_fn=_loss).peak
    before = _traced()
    fitted = memfit.fit(model, (inputs,), budget=int(0.8 * peak), loss_fn=_loss, search_seconds=0.1)
    gradients = _step(fitted, inputs)
    assert _traced() == before + 1
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


class _Broken(nn.Module):
    """Layers with a graph break behind each, so that the same graph runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return x


def test_the_graphs_of_a_broken_step_are_traced_for_the_capture_only() -> None:
    model, inputs = _Broken(), torch.randn(256, 32)
    expected = _step(copy.deepcopy(model), inputs)
    asked = Request(budget=1, loss_fn=_loss, search_seconds=0.1)
    capture, graph = capture_and_profile(model, (inputs,), {}, asked)
    assert len(capture.subgraphs.subgraphs) == 2
    baseline_bytes, least_bytes = simulate_baseline(graph).peak_bytes, widest_op_bytes(graph)
    before = _followed(), _traced()
    for share in (0.6, 1.0):
        budget_bytes = int(least_bytes + share * (baseline_bytes - least_bytes))
        program = plan_captured(model, (inputs,), {}, capture, graph, asked, budget_bytes).program
        planned = compile_program(model, capture, program)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            _loss(planned(inputs)).backward()
            assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert (_followed(), _traced()) == before


class _Scaled(nn.Module):
    """The layers, and a number in Python that Dynamo guards and that no op shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.turn = _model(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output if self.turn < 0 else output + 1


def test_a_graph_that_is_made_while_a_plan_runs_is_compiled_for_each_plan() -> None:
    model, inputs = _Scaled(), torch.randn(2048, 32)
    asked = Request(budget=1, loss_fn=_loss, search_seconds=0.1)
    capture, graph = capture_and_profile(model, (inputs,), {}, asked)
    baseline_bytes, least_bytes = simulate_baseline(graph).peak_bytes, widest_op_bytes(graph)
    peaks = []
    model.turn = 1  # from here on the guards of the capture fail
    expected = _step(copy.deepcopy(model), inputs)
    for share in (1.0, 0.3):
        budget_bytes = int(least_bytes + share * (baseline_bytes - least_bytes))
        program = plan_captured(model, (inputs,), {}, capture, graph, asked, budget_bytes).program
        planned = compile_program(model, capture, program)

        def step(planned: PlannedCall = planned) -> None:
            model.zero_grad()
            torch.manual_seed(1)
            _loss(planned(inputs)).backward()

        step()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
        peaks.append(allocation_peak(step))
    assert peaks[1] < 0.9 * peaks[0]


def test_inputs_are_not_kept_by_what_dynamo_compiled() -> None:
    for model in (_model(), _Broken()):
        inputs = torch.randn(256, 32)
        peak = memfit.estimate(model, (inputs,), loss_fn=_loss).peak
        fitted = memfit.fit(model, (inputs,), budget=int(0.9 * peak), loss_fn=_loss, search_seconds=0.1)
        alive = weakref.ref(inputs)
        _step(fitted, torch.randn(256, 32))
        del inputs
        gc.collect()
        assert alive() is None


def test_each_plan_of_a_capture_changes_a_copy() -> None:
    model, inputs = _model(), torch.randn(256, 32)
    expected = _step(copy.deepcopy(model), inputs)
    asked = Request(budget=1, loss_fn=_loss, search_seconds=0.1)
    capture, graph = capture_and_profile(model, (inputs,), {}, asked)
    baseline_bytes, least_bytes = simulate_baseline(graph).peak_bytes, widest_op_bytes(graph)
    before = _traced()
    for share in (0.5, 1.0, 0.5):
        budget_bytes = int(least_bytes + share * (baseline_bytes - least_bytes))
        program = plan_captured(model, (inputs,), {}, capture, graph, asked, budget_bytes).program
        planned = compile_program(model, capture, program)
        model.zero_grad()
        torch.manual_seed(1)
        _loss(planned(inputs)).backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
        assert bool(program.recomputed()) == (share < 1.0)
    assert _traced() == before


def test_what_compiling_a_plan_notes_is_not_in_the_kept_trace() -> None:
    """AOTAutograd notes dynamic saved tensors of a compiled graph in the analysis, which the next plan gets too."""

    @dataclasses.dataclass
    class Analysis:
        dynamic: dict[int, set[int]]
        inputs: list[int]
        number: int = 3

    kept = Analysis(dynamic={}, inputs=[1])
    given = _with_own_containers(kept)
    assert given == kept and given is not kept
    given.dynamic[7] = {0}
    given.inputs.append(2)
    assert kept == Analysis(dynamic={}, inputs=[1])
    assert _with_own_containers(kept.inputs) == [1] and _with_own_containers(kept.inputs) is not kept.inputs
