"""Batch normalisation runs again from the statistics of its first run, with the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.ir.graph import Phase
from memfit.ops.kernels.batch_norm import normalise, normalise_over_data
from memfit.ops.recompute import from_statistics
from memfit.profiling.benchmark import Costs, recompute_costs
from memfit.tools.verify import verify
from memfit.zoo import build

_aten = torch.ops.aten
NORM = _aten._native_batch_norm_legit_functional.default


@pytest.mark.smoke
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(6, 24, 13, 11), (2, 3, 5, 5), (8, 40, 33), (3, 16, 4, 5, 6), (64, 10)])
def test_same_bits(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    data, channels = 3 * torch.randn(shape) + 1, shape[1]
    weight, bias = (torch.rand(channels), torch.randn(channels)) if affine else (None, None)
    whole, mean, invstd = _aten.native_batch_norm(data, weight, bias, None, None, True, 0.1, 1e-5)
    again = normalise(data, mean, invstd, weight, bias)
    assert torch.equal(again, whole) and again.stride() == whole.stride()
    assert torch.equal(normalise_over_data(data, mean, invstd, weight, bias), whole)
    assert torch.equal(data, whole)


def convolutions() -> nn.Sequential:
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Turned(nn.Module):
    """Data whose channels are the first axis in memory, of which the kernel makes a contiguous result."""

    def __init__(self, axes: tuple[int, int]) -> None:
        super().__init__()
        self.axes, self.first, self.norm, self.last = axes, nn.Linear(6, 6), nn.BatchNorm1d(8), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x).transpose(*self.axes))).tanh()


@pytest.mark.smoke
@pytest.mark.parametrize(("shape", "axes", "made"), [((4, 8, 6), (0, 0), True), ((8, 4, 6), (0, 1), False)])
def test_parts_of_a_normalisation_are_made_where_they_lie_as_the_whole(
    shape: tuple[int, ...], axes: tuple[int, int], made: bool
) -> None:
    model, x = Turned(axes), torch.randn(shape)
    (subgraph,) = capture_step(model, (x,), {}, loss_fn=loss_fn).subgraphs.subgraphs
    (whole,) = subgraph.reading.module.graph.find_nodes(op="call_function", target=NORM)
    assert (from_statistics(whole) is not None) is made
    (subgraph,) = capture_step(
        model, (x,), {}, loss_fn=loss_fn, options=CaptureOptions(grid=(2, 2))
    ).subgraphs.subgraphs
    targets = [node.target for node in subgraph.reading.module.graph.nodes]
    assert (normalise in targets, NORM in targets) == (made, not made)
    kernel, parts = whole.meta["val"][0], [n for n in subgraph.reading.module.graph.nodes if n.target is normalise]
    assert all(part.meta["val"].stride() == kernel.stride() for part in parts)


def test_a_plan_normalises_again_without_new_statistics() -> None:
    torch.manual_seed(0)
    model, x = convolutions(), torch.randn(4, 8, 16, 16)
    result = verify(model, (x,), {}, Request(budget="4MiB", loss_fn=loss_fn, strategy="sequential:2", prove=False))
    graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))[1]
    again = [graph.ops[i].later.target for i in result.plan.program.recomputed()]
    assert "memfit.normalise.default" in again
    assert result.recomputes_executed == result.recomputes_planned
    assert not result.differing


def test_where_the_bits_differ_the_whole_kernel_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.profiling.measurements.recompute_costs", lambda *_: Costs(variants=()))
    torch.manual_seed(0)
    model, x = convolutions(), torch.randn(4, 8, 16, 15)
    graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))[1]
    assert all(op.recompute_as is None for op in graph.ops)
    result = verify(model, (x,), {}, Request(budget="4MiB", loss_fn=loss_fn, strategy="sequential:2", prove=False))
    assert result.recomputes_executed == result.recomputes_planned > 0
    assert not result.differing


def test_where_the_bits_differ_read_statistics_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instance normalisation averages the new running statistics of all samples."""
    monkeypatch.setattr("memfit.profiling.measurements.recompute_costs", lambda *_: Costs(variants=()))
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(8, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 8, 16, 15)
    graph = capture_and_profile(model, (x,), {}, Request(budget=1, loss_fn=loss_fn))[1]
    norms = [op for op in graph.ops if "batch_norm" in op.target and "backward" not in op.target]
    assert norms and not any(op.recomputable for op in norms)
    result = verify(model, (x,), {}, Request(budget="4MiB", loss_fn=loss_fn, strategy="sequential:2", prove=False))
    assert not result.differing


def test_a_kernel_that_cannot_run_here_is_not_used() -> None:
    model, x = convolutions(), torch.randn(2, 8, 6, 6)
    capture = capture_step(model, (x,), {}, loss_fn=loss_fn)
    joint = next(op for op in capture.joint_ops if op is not None and op.recompute_as is not None)
    assert joint.recompute_as is not None

    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel here")

    assert recompute_costs(joint.node, joint.recompute_as, 0, torch.device("cpu")).variants
    failing = replace(joint.recompute_as, target=fails)
    assert recompute_costs(joint.node, failing, 0, torch.device("cpu")) == Costs(variants=())


class Returned(nn.Module):
    """Both what is normalised and the result are the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = convolutions(), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers(x)
        normed = self.layers[1](x)
        return normed, self.last(normed.sigmoid().sin())


def test_a_returned_result_stays_the_callers() -> None:
    torch.manual_seed(0)
    model, x = Returned(), torch.randn(4, 8, 16, 16)

    def both(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return outputs[0].square().mean() + outputs[1].square().mean()

    result = verify(model, (x,), {}, Request(budget="4MiB", loss_fn=both, strategy="every-block", prove=False))
    assert not result.differing


def test_attention_that_draws_nothing_runs_again() -> None:
    """Its kernel is marked as random, whatever the share that is dropped."""
    example = build("zoo:llama?layers=1&width=32&heads=4&kv_heads=2", batch=2, shape=(16,))
    request = Request(budget=1, loss_fn=example.loss_fn, tiers="none")
    _, graph = capture_and_profile(example.model, tuple(example.args), example.kwargs, request)
    (attention,) = [op for op in graph.ops if "attention" in op.target and op.phase is Phase.FORWARD]
    assert attention.recomputable and not attention.random_state_bytes
