"""A plan survives a file, and is refused where it does not belong."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from tests.models import Residual

X = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model = Residual(blocks=1)
    plain = memfit.plan(model, (X,), budget="1GiB", loss_fn=loss_fn, prove=False).predicted.plain_peak_bytes
    memfit.plan(model, (X,), budget=int(0.75 * plain), loss_fn=loss_fn, search_seconds=0.5).save(path)
    return path


def test_round_trip_runs_the_same_program(saved: Path) -> None:
    plan = memfit.Plan.load(saved)
    model = Residual(blocks=1)
    plan.apply(model, loss_fn=loss_fn)
    loss_fn(model(X)).backward()
    assert memfit.plan_of(model).program == plan.program
    assert "recompute" in str(plan)


class Checkpointed(nn.Module):
    """Checkpoints its blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def test_a_plan_that_replaces_checkpoints_does_so_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    memfit.plan(model, (x,), budget="1GiB", loss_fn=loss_fn, checkpointing="replace").save(tmp_path / "plan.json")
    memfit.Plan.load(tmp_path / "plan.json").apply(model, loss_fn=loss_fn)
    for module in (model, plain):
        loss_fn(module(x)).backward()
    assert memfit.plan_of(model).checkpointing == "replace"
    assert all(torch.equal(*pair) for pair in zip(gradients_of(model), gradients_of(plain), strict=True))


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_the_file_is_private(saved: Path) -> None:
    assert saved.stat().st_mode & 0o077 == 0


def test_another_model_is_refused(saved: Path) -> None:
    model = Residual(16)
    with pytest.raises(memfit.PlanMismatchError, match=r"parameters.*; make a plan of what is here"):
        memfit.Plan.load(saved).apply(model)
    assert model._compiled_call_impl is None


def test_another_shape_is_refused(saved: Path) -> None:
    model = memfit.Plan.load(saved).apply(Residual(blocks=1), loss_fn=loss_fn)
    with pytest.raises(memfit.PlanMismatchError, match=r"inputs.*; make a plan of what is here"):
        model(torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize("damage", ["{", "[]", '{"schema_version": 99}', "null", "\x00"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(damage)
    with pytest.raises(memfit.PlanFileError):
        memfit.Plan.load(path)


def test_a_foreign_program_is_never_run(saved: Path, tmp_path: Path) -> None:
    document = json.loads(saved.read_text())
    program = document["program"]
    program["instructions"] = [step for step in program["instructions"] if step[0] != "f"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    model = memfit.Plan.load(path).apply(Residual(blocks=1), loss_fn=loss_fn)
    with pytest.raises(memfit.MemfitError, match=r"never freed|still alive"):
        model(X)
