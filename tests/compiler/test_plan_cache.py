"""Plans of earlier runs, from the disk: the same step, budget and machine take the same plan, without a search."""

from __future__ import annotations

import copy
import os
import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.compiler.plan_cache import drop_oldest, is_known_to_need_a_plan
from memfit.compiler.request import Request
from memfit.fitted.installation import fitted_call
from memfit.fitted.plan import Plan

_BUDGET = 500_000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own, and modules that are fitted as outside of the tests."""
    monkeypatch.delenv("MEMFIT_PLAN")
    monkeypatch.delenv("MEMFIT_KEEP_PLANS")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    return tmp_path / "plans"


def fitted(budget: int = _BUDGET) -> Plan:
    """The plan of a new process, as it were; its step is compared with the plain one."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    x = torch.randn(256, 64)
    memfit.fit(model, (x,), budget=budget)
    for one in (plain, model):
        one(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]
    return memfit.plan_of(model)


@pytest.mark.smoke
def test_the_next_run_takes_the_plan_from_the_disk(folder: Path) -> None:
    first = fitted()
    assert first.proof is not None and not first.is_plain
    (path,) = folder.glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    second = fitted()
    assert second.proof is None and second.program == first.program
    assert second.predicted == first.predicted and second.budget_bytes == _BUDGET
    assert list(folder.glob("*.json")) == [path]


def test_the_next_run_does_not_count_the_baseline_step_again(folder: Path) -> None:
    x, request = torch.randn(256, 64), Request(budget=_BUDGET, plain=True)
    assert not is_known_to_need_a_plan(Net(), (x,), {}, request, _BUDGET)
    fitted()
    assert is_known_to_need_a_plan(Net(), (x,), {}, request, _BUDGET)
    assert not is_known_to_need_a_plan(Net(), (x,), {}, request, 2 * _BUDGET)
    assert fitted(2**30).is_plain


def test_a_module_of_one_size_is_not_captured_for_many_the_next_time(folder: Path) -> None:
    def calls(*sizes: int) -> int:
        model = Net()
        memfit.fit(model, budget=_BUDGET, optimizer=0)
        for size in sizes:
            model(torch.randn(size, 64)).backward()
            model.zero_grad()
        return len(fitted_call(model).symbolic.made)

    assert calls(256) == 1  # what comes is not known yet
    assert calls(256) == 0
    assert calls(256, 250) == 1  # from the second size on
    assert calls(256) == 1  # an earlier run had many sizes


def test_another_budget_is_another_plan(folder: Path) -> None:
    fitted()
    assert fitted(_BUDGET + 50_000).proof is not None
    assert len(list(folder.glob("*.json"))) == 2


def test_who_asks_for_a_plan_gets_a_new_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted()
    monkeypatch.setenv("MEMFIT_PLAN", "always")
    assert fitted().proof is not None


def test_plans_need_not_be_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_KEEP_PLANS", "no")
    assert fitted().proof is not None and not folder.exists()


def test_damaged_files_and_wrong_programs_are_told_and_replaced(folder: Path, told: list[str]) -> None:
    fitted()
    (path,) = folder.glob("*.json")
    whole = path.read_text()
    for damaged in (whole[:100], whole.replace('["c",', '["f",', 1), "{}"):
        path.write_text(damaged)
        assert fitted().proof is not None
        assert path.read_text() != damaged
    assert sum("ignoring the plan in" in line for line in told) == 3


def test_a_disk_that_cannot_be_written_is_told(folder: Path, told: list[str]) -> None:
    folder.write_text("no folder")
    assert fitted().proof is not None
    assert any("is not kept for later runs" in line for line in told)


def test_the_oldest_plans_go_first(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        path = tmp_path / f"{name}.json"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    drop_oldest(tmp_path, 250)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "b"]
    for name in "ef":
        (tmp_path / f"{name}.needed").touch()
    drop_oldest(tmp_path, 2 * 4096)  # a note counts as much as a file takes at least
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["e", "f"]
