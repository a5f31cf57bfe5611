"""A disk for small models (`tests.small_disk`), in a directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit.runtime.offload.disk import DiskSpace
from tests.small_disk import make_small_disk


@pytest.fixture(autouse=True)
def swap_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this test swaps."""
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path / "swap"))
    return tmp_path / "swap"


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything of a kilobyte and more may be swapped, over a link that takes no time."""
    make_small_disk(monkeypatch, tmp_path / "cache")


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> list[DiskSpace]:
    """Every disk that is opened."""
    opened: list[DiskSpace] = []
    begin = DiskSpace.__init__

    def noted(self: DiskSpace, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        opened.append(self)

    monkeypatch.setattr(DiskSpace, "__init__", noted)
    return opened


@pytest.fixture
def same_step() -> Callable[[nn.Module, nn.Module, Callable[[nn.Module], torch.Tensor]], None]:
    """Runs a step of a fitted module and of its plain twin, and compares all bits they leave."""

    def run(fitted: nn.Module, plain: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        for model in (fitted, plain):
            torch.manual_seed(1)
            model.zero_grad()
            loss(model).backward()
        pairs = zip(fitted.named_parameters(), plain.parameters(), strict=True)
        assert [name for (name, p), q in pairs if not torch.equal(p.grad, q.grad)] == []
        assert all(torch.equal(a, b) for a, b in zip(fitted.buffers(), plain.buffers(), strict=True))

    return run
