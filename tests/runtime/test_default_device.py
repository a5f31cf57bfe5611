"""Where the user sets a default device, tensors of memfit's own still lie where the model's do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.bits import same_bits
from tests import models
from tests.small_disk import make_small_disk


@pytest.fixture
def another_device() -> Iterator[None]:
    """A device on which no number can be read, so that no tensor may come there by mistake."""
    with torch.device("meta"):
        yield


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    with torch.device("cpu"):
        make_small_disk(monkeypatch, tmp_path / "cache")


def square(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.usefixtures("another_device", "small_disk")
@pytest.mark.parametrize(
    ("model", "shape", "share", "more"),
    [
        (models.Residual, (4, 3, 24, 24), 0.8, {}),
        (models.Residual, (4, 3, 24, 24), None, {"levers": "all", "strategy": "tile:2x2"}),
        (models.Residual, (8, 3, 24, 24), 0.9, {"tiers": "disk", "strategy": "swap"}),
        (models.Broken, (64, 16), None, {}),
    ],
    ids=["recompute", "tiles", "disk", "subgraphs"],
)
def test_steps_run_where_the_model_is(
    model: type[nn.Module], shape: tuple[int, ...], share: float | None, more: dict[str, Any]
) -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        plain, x = model(**({} if model is models.Broken else {"blocks": 1})), torch.randn(shape)
    fitted = copy.deepcopy(plain)
    budget = int(share * memfit.estimate(fitted, (x,), loss_fn=square).peak) if share else "1GiB"
    memfit.fit(fitted, (x,), budget=budget, loss_fn=square, **more)
    for one in (plain, fitted):
        torch.manual_seed(1)
        square(one(x)).backward()
    for p, q in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert same_bits(p.grad, q.grad) or ("levers" in more and torch.allclose(p.grad, q.grad, atol=1e-6))
