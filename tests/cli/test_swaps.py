"""Commands that know swaps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.ir.tiers import Tier
from tests.small_disk import make_small_disk

MODEL = "zoo:mlp?layers=6&width=64"
SHAPE = ("--batch", 4096, "--shape", 16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_SWAP_DIR", str(tmp_path))
    make_small_disk(monkeypatch, tmp_path / "cache", rate=1e9)


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
    for command in (("calibrate",), ("plan", MODEL, *SHAPE, "--budget", "90%plain")):
        outcome = memfit(*command, "--tiers", tiers)
        assert outcome.code == 2
        assert "tiers" in outcome.err


def test_plan_and_verify_say_what_moves(memfit: Callable[..., Any], tmp_path: Path) -> None:
    where = (MODEL, *SHAPE, "--tiers", Tier.DISK, "--strategy", "swap", "--budget", "80%plain")
    plan = memfit("plan", *where, "--save", tmp_path / "plan.json")
    assert plan.code == 0
    assert " swaps " in plan.out and " on the disk" in plan.out and "swap " in plan.out
    assert " / swap " in plan.last
    outcome = memfit("verify", MODEL, *SHAPE, "--plan", tmp_path / "plan.json", "--json", tmp_path / "verify.json")
    assert outcome.code == 0, outcome.out + outcome.err
    assert "; swapped " in outcome.last
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["peak_measured_bytes"] <= found["peak_predicted_bytes"]  # its transfers use the chunks of the plan
    assert found["swap_out_executed_bytes"] == found["swap_out_planned_bytes"] == found["disk_bytes"] > 0
    assert found["swap_in_executed_bytes"] == found["swap_in_planned_bytes"] > 0


def test_verify_shows_swaps(memfit: Callable[..., Any]) -> None:
    where = (MODEL, *SHAPE, "--tiers", "disk", "--strategy", "swap", "--budget", "80%plain")
    out = memfit("verify", *where).out
    assert all(words in out for words in ("swaps of a step", "moved out", "peak on the disk", "compute waits"))


def test_estimate_says_what_swapping_can_do(memfit: Callable[..., Any]) -> None:
    assert "swapped" not in memfit("estimate", MODEL, *SHAPE).out
    out = memfit("estimate", MODEL, *SHAPE, "--tiers", "disk").out
    assert "with all swapped that can be" in out and "peak on the disk" in out and "compute waits" in out
    found = json.loads(memfit("estimate", MODEL, *SHAPE, "--tiers", "disk", "--json").out)
    assert 0 < found["swapping"]["peak_bytes"] < found["predicted_peak_bytes"]
    assert found["swapping"]["out_bytes"] == found["swapping"]["disk_bytes"] > 0
    no_device = memfit("estimate", MODEL, *SHAPE, "--device", "meta", "--tiers", "disk")
    assert no_device.code == 2 and "device: meta" in no_device.err


def test_compare_shows_swaps(memfit: Callable[..., Any]) -> None:
    where = (MODEL, *SHAPE, "--tiers", "disk", "--strategy", "none,swap,auto", "--budget", "80%", "--repeats", 1)
    outcome = memfit("compare", *where, "--json")
    assert outcome.code == 0
    rows = {row["strategy"]: row for row in json.loads(outcome.out)["rows"]}
    assert rows["swap"]["swap_out_predicted_bytes"] == rows["swap"]["disk_bytes"] > 0
    assert rows["swap"]["swapped_activations"] > 0
    assert rows["none"]["swap_out_predicted_bytes"] == 0
