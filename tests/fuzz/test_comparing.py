"""The fuzz finds what it looks for: a comparison that cannot fail proves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memfit
from benchmarks.fuzz import compare as comparing
from benchmarks.fuzz import estimates
from benchmarks.fuzz.compare import Plain, compare, plain_run
from benchmarks.fuzz.cpu_allocator import CpuAllocatorBytes
from benchmarks.fuzz.live_bytes import LiveBytes
from benchmarks.fuzz.modes import MODES
from benchmarks.fuzz.recipe import Recipe, choose
from benchmarks.fuzz.snapshot import differences, same, snapshot

MODE = MODES["bitwise"]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return choose(1, MODE, ("linear", "layer_norm", "activation"))


@pytest.fixture(scope="module")
def plain(recipe: Recipe) -> Plain:
    return plain_run(recipe)


class Fitting:
    """Stands in for `memfit` in the comparison: a fit that does something it should not."""

    def __init__(self, wrong: Any, budget: int | None) -> None:
        self.wrong, self.budget = wrong, budget

    def __getattr__(self, name: str) -> Any:
        return getattr(memfit, name)

    def fit(self, model: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
        memfit.fit(model, *args, **keywords | ({} if self.budget is None else {"budget": self.budget}))
        self.wrong(model, keywords)
        return model


def tried(
    recipe: Recipe,
    plain: Plain,
    wrong: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    share: float = 1.2,
    budget: int | None = None,
) -> dict[str, Any]:
    monkeypatch.setattr(comparing, "memfit", Fitting(wrong, budget))
    return compare(recipe, plain, share)


def test_nothing_wrong(recipe: Recipe, plain: Plain) -> None:
    row = compare(recipe, plain, 1.2)
    assert row["status"] == "ok", row


def test_a_changed_parameter(recipe: Recipe, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, keywords: Any) -> None:
        with torch.no_grad():
            parameter = next(model.parameters())
            parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0))

    row = tried(recipe, plain, wrong, monkeypatch)
    assert row["status"] == "BAD"
    assert any("fit changed model" in line for line in row["problems"])
    assert any("gradient" in line for line in row["problems"])


def test_a_moved_generator(recipe: Recipe, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    row = tried(recipe, plain, lambda *_: torch.rand(1), monkeypatch)
    assert row["problems"] == ["fit changed random.torch"]


def test_a_gradient_left_behind(recipe: Recipe, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, keywords: Any) -> None:
        parameter = next(model.parameters())
        parameter.grad = torch.zeros_like(parameter)

    row = tried(recipe, plain, wrong, monkeypatch)
    assert len(row["problems"]) == 1 and row["problems"][0].endswith(".grad")


def test_a_loss_that_was_called_on_the_side(recipe: Recipe, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, keywords: Any) -> None:
        keywords["loss_fn"].calls += 1

    assert "fit changed loss.calls" in tried(recipe, plain, wrong, monkeypatch)["problems"]


def test_a_plan_for_another_budget(recipe: Recipe, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    row = tried(recipe, plain, lambda *_: None, monkeypatch, share=0.5, budget=2 * plain.peak_bytes)
    assert row["status"] == "BAD"
    assert [line[:15] for line in row["problems"]] == ["over the budget"]


def test_an_error_of_torch(recipe: Recipe, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, keywords: Any) -> None:
        raise KeyError("val")

    row = tried(recipe, plain, wrong, monkeypatch)
    assert (row["status"], row["error"]) == ("CRASH", "KeyError: 'val'")


def test_live_bytes_counts_what_lives() -> None:
    held = torch.ones(100)
    with LiveBytes([held]) as live:
        held.add_(1)
        a = torch.ones(1000)
        b = a.view(10, 100) + 1  # a view is no storage
        del a
        c = b * 2
        del b
        torch.empty(5000, device="meta")  # has a size and no memory
    assert live.peak_bytes == 8000
    assert c.shape == (10, 100)


def test_the_allocator_counts_what_is_added_in_place() -> None:
    """While a mode is active, autograd adds the gradients of two uses of a tensor to a third one."""

    def step() -> None:
        y = torch.ones(25_000, requires_grad=True) * 2
        factor = torch.ones(25_000)
        ((y * factor).sum() + (y * factor).sum() + (y * factor).sum()).backward()

    with CpuAllocatorBytes() as allocator:
        step()
    with LiveBytes() as live:
        step()
    assert live.peak_bytes - allocator.peak_bytes == pytest.approx(100_000, abs=1000)


def test_snapshots_see_everything_reachable() -> None:
    module = nn.Linear(2, 2)
    module.kept, module.generator = [{"a": torch.zeros(2)}], torch.Generator()  # type: ignore[assignment]
    before = snapshot(module=module)
    assert not differences(before, snapshot(module=module))
    module.kept[0]["a"][1] = -0.0  # type: ignore[index,operator]
    module.kept.append(1)  # type: ignore[operator]
    torch.rand(1, generator=module.generator)  # type: ignore[call-overload]
    found = differences(before, snapshot(module=module))
    assert found == ["module.kept[0].a", "module.kept.len", "module.generator", "module.kept[1]"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_same_is_bit_by_bit(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    assert same(zero, zero.clone())
    assert not same(zero, -zero)
    assert not same(zero, zero.double() if dtype is not torch.float64 else zero.float())
    assert not same(zero, None)


def test_estimates_of_random_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimates.main(["--seeds", "77000-77001"]) == 0
    assert "2 of 2 models within 2 %" in capsys.readouterr().out
