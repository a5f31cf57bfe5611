"""Commands that know swaps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.step.links import Tier

GPT = "zoo:gpt?layers=3&width=64&heads=4&vocabulary=100"
SHAPE = ("--batch", 8, "--shape", 64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    monkeypatch.setattr("memfit.runtime.swap.calibrate._SECONDS", 0.02)
    monkeypatch.setattr("memfit.planner.swapping._LEAST_BYTES", 1024)


def test_calibrate(memfit: Callable[..., Any]) -> None:
    outcome = memfit("calibrate", "--json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)["rows"]
    assert [(row["tier"], row["direction"]) for row in rows] == [("disk", "out"), ("disk", "in")]
    assert all(0 < row["bytes_per_second"] <= row["alone_bytes_per_second"] for row in rows)
    table = memfit("calibrate")
    assert "beside compute" in table.out
    assert table.last.startswith("Measured: disk out ")


@pytest.mark.parametrize("tiers", ["host", "tape"])
def test_tiers_that_are_not_there(memfit: Callable[..., Any], tiers: str) -> None:
    for command in (("calibrate",), ("plan", GPT, *SHAPE, "--budget", "90%plain")):
        outcome = memfit(*command, "--tiers", tiers)
        assert outcome.code == 2
        assert "tiers" in outcome.err


def test_plan_and_verify_say_what_moves(memfit: Callable[..., Any], tmp_path: Path) -> None:
    where = (GPT, *SHAPE, "--tiers", Tier.DISK, "--strategy", "swap", "--budget", "80%plain")
    plan = memfit("plan", *where, "--save", tmp_path / "plan.json")
    assert plan.code == 0
    assert " swaps " in plan.out and " on the disk" in plan.out and "swap " in plan.out
    assert " / swap " in plan.last
    outcome = memfit("verify", GPT, *SHAPE, "--plan", tmp_path / "plan.json")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "; swapped " in outcome.last


def test_compare_shows_swaps(memfit: Callable[..., Any]) -> None:
    where = (GPT, *SHAPE, "--tiers", "disk", "--strategy", "none,swap,auto", "--budget", "80%", "--repeats", 1)
    outcome = memfit("compare", *where, "--json")
    assert outcome.code == 0
    rows = {row["strategy"]: row for row in json.loads(outcome.out)["rows"]}
    assert rows["swap"]["swap_out_predicted_bytes"] == rows["swap"]["disk_bytes"] > 0
    assert rows["swap"]["swapped_activations"] > 0
    assert rows["none"]["swap_out_predicted_bytes"] == 0
