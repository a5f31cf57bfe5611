"""A joint graph is traced once and read in several ways; each reading is that of a new capture."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import compilation_time_metrics

import memfit
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import Capture, capture_step, read_again
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.errors import BudgetError
from memfit.ir.serialization import graph_digest
from memfit.ops.accumulation import Accumulate
from memfit.profiling import profiler
from memfit.zoo import build

_DYNAMO, _AOT = "_compile.compile_inner", "aot_trace_joint_graph"  # torch times each by this name


class _Growing(nn.Module):
    """Convolutions of what was concatenated before, whose weights' gradients may be made part by part."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * n, 4, 3, padding=1) for n in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 4 * n) for n in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.cat([x, layer(norm(x).relu())], 1)
        return x


class _Broken(nn.Module):
    """Two graphs, with dropout in both; the second takes a result of the first twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y) + y


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _of_zoo(spec: str, batch: int, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    example = build(spec, batch=batch, shape=shape)
    return example.model, tuple(example.args), example.kwargs, example.loss_fn


def _by_channels() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    model = _Growing().to(memory_format=torch.channels_last)
    return model, (torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last),), {}, _square


_STEPS = {
    "channels last": _by_channels,
    "convolutions": lambda: (_Growing(layers=3), (torch.randn(4, 3, 16, 16),), {}, _square),
    "two graphs": lambda: (_Broken(), (torch.randn(4, 3, 16, 16),), {}, _square),
    "language": lambda: _of_zoo("zoo:gpt?layers=1&width=16&heads=2", 2, (8,)),
}


def _named(capture: Capture) -> list[list[str]]:
    return [[node.name for node in subgraph.reading.module.graph.nodes] for subgraph in capture.subgraphs.subgraphs]


@pytest.mark.parametrize(
    ("name", "accumulate", "grids"),
    [
        ("channels last", None, [(), (2, 2)]),
        ("convolutions", None, [(2, 2), (1, 1, 2)]),
        ("two graphs", None, [(1, 1, 2), (2, 2)]),
        ("language", None, [(), (2, 2)]),
        ("convolutions", Accumulate.AS_MADE, [(1, 1, 2)]),
    ],
)
def test_a_reading_is_that_of_a_new_capture(
    name: str, accumulate: Accumulate | None, grids: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model, args, kwargs, loss_fn = _STEPS[name]()

    def captured(**choices: Any) -> Capture:
        options = CaptureOptions(accumulate=accumulate, **choices)
        return capture_step(copy.deepcopy(model), args, kwargs, loss_fn=loss_fn, options=options)

    once = captured(separate=_everything, grid=(3, 1))
    for grid in grids:
        separate = _everything if grid == (2, 2) else _nothing
        with torch.autocast("cpu", torch.bfloat16):  # is no part of the step
            again = read_again(once, separate=separate, grid=grid, device_type="cpu")
        anew = captured(separate=separate, grid=grid)
        assert again.graph == anew.graph
        assert _named(again) == _named(anew)
        assert again.separated == anew.separated and again.grid == anew.grid
        once = again


def _everything(_: str) -> bool:
    return True


def _nothing(_: str) -> bool:
    return False


def _traces() -> tuple[int, int]:
    return len(compilation_time_metrics.get(_DYNAMO, ())), len(compilation_time_metrics.get(_AOT, ()))


@pytest.mark.parametrize(("share", "levers"), [(0.5, "all"), (0.0, "bitwise"), (0.0, "all")])
def test_fit_traces_once_whatever_it_tries(share: float, levers: str) -> None:
    torch.manual_seed(0)
    model, inputs = _Growing(), torch.randn(4, 3, 16, 16)
    peak = memfit.estimate(model, (inputs,), loss_fn=_square).peak
    before = _traces()
    with contextlib.suppress(BudgetError):
        memfit.fit(
            model, (inputs,), budget=max(1, int(share * peak)), loss_fn=_square, levers=levers, search_seconds=0.1
        )
    assert _traces() == (before[0] + 1, before[1] + 1)


def test_a_step_in_tiles_is_read_from_the_trace_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        profiler, "library_bytes", lambda *_, **__: 1 << 20
    )  # as on a GPU, whose libraries keep workspaces
    torch.manual_seed(0)
    model, inputs = _Growing(), torch.randn(4, 3, 16, 16)
    request = Request(budget=1, loss_fn=_square, levers="all", beside_bytes=4096)
    whole, _ = capture_and_profile(model, (inputs,), {}, request)
    before = _traces()
    tiled, graph = capture_and_profile(model, (inputs,), {}, request, grid=(2, 1), before=whole)
    assert _traces() == before
    anew, expected = capture_and_profile(model, (inputs,), {}, request, grid=(2, 1))
    assert graph.is_tiled and graph.static_bytes == expected.static_bytes
    assert graph_digest(graph) == graph_digest(expected) and tiled.separated == anew.separated
