"""Memory that is there for a whole step, by name and kind."""

from __future__ import annotations

import torch
from torch import nn

from memfit.capture.residents import storage_bytes
from memfit.capture.training_step import capture_step
from memfit.ir.residents import ResidentKind, bytes_of


def _named(model: nn.Module, x: torch.Tensor, **options: object) -> dict[tuple[ResidentKind, str], int]:
    graph = capture_step(model, (x,), {}, loss_fn=lambda y: y.square().mean(), **options).graph  # type: ignore[arg-type]
    assert graph.static_bytes == sum(resident.nbytes for resident in graph.residents)
    return {(resident.kind, resident.name): resident.nbytes for resident in graph.residents}


def test_each_tensor_has_a_record_with_its_name() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.randn(16, 8)
    named = _named(model, x, optimizer=torch.optim.Adam(model.parameters()))
    assert named[ResidentKind.PARAMETER, "0.weight"] == 8 * 4 * 4
    assert named[ResidentKind.BUFFER, "1.running_mean"] == 4 * 4
    assert named[ResidentKind.INPUT, "0"] == x.nbytes
    assert named[ResidentKind.OPTIMIZER_STATE, "0.weight"] >= 2 * 8 * 4 * 4
    assert not any(kind is ResidentKind.GRADIENT for kind, _ in named)
    model(x).sum().backward()
    assert _named(model, x)[ResidentKind.GRADIENT, "0.weight"] == 8 * 4 * 4


def test_shared_memory_counts_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].bias.detach())
    x = torch.randn(4, 8)
    found = _named(model, x)
    assert [name for kind, name in found if kind is ResidentKind.PARAMETER] == ["0.weight", "0.bias", "1.bias"]
    assert not any(kind is ResidentKind.BUFFER for kind, _ in found)
    assert sum(found.values()) == storage_bytes([*model.parameters(), x], "cpu")


def test_bytes_of_kinds() -> None:
    graph = capture_step(nn.Linear(8, 4), (torch.randn(16, 8),), {}, loss_fn=lambda y: y.sum()).graph
    more = graph.beside("a library", 100, ResidentKind.LIBRARY)
    assert graph.beside("nothing", 0, ResidentKind.LIBRARY) is graph
    assert bytes_of(more.residents, ResidentKind.LIBRARY) == 100 == more.static_bytes - graph.static_bytes
