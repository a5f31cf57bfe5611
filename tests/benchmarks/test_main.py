from __future__ import annotations

import pytest

import benchmarks.overhead.main as overhead
import benchmarks.peers.main as peers
import benchmarks.planning.main as planning
import benchmarks.seeds.main as seeds

GPT = "zoo:gpt?layers=1&width=32&heads=2&positions=32"


@pytest.fixture(autouse=True)
def own_cost_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows, headers included, separators not."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_overhead(capsys):
    overhead.main(["--only", f"{GPT}@4@32", "--budgets", "90", "--wall", "1"])
    (_, model, header, first, timed) = rows(capsys.readouterr().out)
    assert model[0] == first[0] == "gpt"
    found = dict(zip(header, timed, strict=True))
    assert float(found["measured peak MiB"]) <= float(found["budget MiB"])
    assert found["tensors that differ"].startswith("0 of ")
    assert found["overhead, wall clock %"]


def test_overhead_without_measuring(capsys):
    overhead.main(["--only", f"{GPT}@4@32", "--budgets", "90,1", "--no-measure"])
    (*_, header, fits, not_) = rows(capsys.readouterr().out)
    assert dict(zip(header, fits, strict=True))["measured peak MiB"] == ""
    assert "does not fit" in not_[3]


def test_peers(capsys):
    peers.main(["--only", f"{GPT}@4@32", "--peers", "budget 0.2", "--wall", "1"])
    header, *cells = rows(capsys.readouterr().out)
    found = [dict(zip(header, row, strict=True)) for row in cells]
    plain, budget = found
    assert plain["peer's gradients"] == "equal"
    assert budget["peer's gradients"].startswith("WRONG")  # random ops run again with another state
    assert {row["memfit's bits"] for row in found} <= {"equal", ""}


def test_seed_003(capsys):
    seeds.main(["--only", "003", "--batches", "2", "--run", "2", "--budget", "1MB", "--model", GPT, "--shape", "32"])
    header, memfit = rows(capsys.readouterr().out)
    assert float(dict(zip(header, memfit, strict=True))["peak after, measured GB"]) <= 0.001


def test_seed_004(capsys):
    seeds.main(["--only", "vgg16", "--run", "1", "--case", "zoo:keras-cnn@1@1x16x16"])
    *_, memfit = rows(capsys.readouterr().out)
    assert memfit[1] == "memfit, held as the seed"
    assert memfit[3] == memfit[4]  # predicted and measured


def test_largest_batch(capsys):
    seeds.main(["--only", "max-batch", "--model", "zoo:mlp?width=64", "--shape", "64", "--batch-budget", "1MB"])
    _, seed, memfit = rows(capsys.readouterr().out)
    assert seed[1] == "seed 001, hybrid"
    assert float(memfit[5]) >= 1


def test_planning(capsys):
    planning.main(["--only", f"{GPT}@4@32", "--budgets", "99", "--fitted", "--repeats", "1"])
    header, planned, _, fitted = rows(capsys.readouterr().out)
    assert float(dict(zip(header, planned, strict=True))["planning s"]) < 60
    assert fitted[0] == "gpt"
