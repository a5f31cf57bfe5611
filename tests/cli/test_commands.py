import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.report.records import COMPARISON_COLUMNS
from memfit.zoo import Example

MODEL = "zoo:mlp?width=64&layers=3"
BATCH = ("--batch", 4096, "--shape", "16")
TRUNK = f"{__file__}:trunk"
CLASSIFIER = f"{__file__}:classifier"
IMAGE = ("--shape", "3,32,32")


def trunk(batch: int, shape: tuple[int, ...]) -> Example:
    """Two convolutions over images of any size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    return Example(model=model, args=(torch.randn(batch, *shape),), loss_fn=torch.mean)


def classifier(batch: int, shape: tuple[int, ...]) -> Example:
    """Two convolutions with batch normalisation, and two classes."""
    layers: list[nn.Module] = []
    for channels in (shape[0], 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    return Example(model=model, args=(torch.randn(batch, *shape),), loss_fn=torch.mean)


def test_estimate_says_what_the_baseline_step_takes(memfit: Callable) -> None:
    found = memfit("estimate", MODEL, *BATCH, "--optimizer", "adam")
    assert found.code == 0 and found.err == ""
    assert "the model was not run" in found.out and "activations" in found.out
    assert found.last.startswith("Takes ") and "predicted" in found.last


def test_estimate_says_whether_the_baseline_step_fits(memfit: Callable) -> None:
    fits = memfit("estimate", MODEL, *BATCH, "--budget", "1GiB", "--json")
    document = json.loads(fits.out)
    assert fits.code == 0 and fits.err.startswith("Fits: ")
    assert document["kind"] == "estimate"
    assert sum(row["predicted_bytes"] for row in document["rows"]) == document["predicted_peak_bytes"]
    too_small = memfit("estimate", MODEL, *BATCH, "--budget", document["predicted_peak_bytes"] - 1)
    assert too_small.code == 1 and "a plan may" in too_small.last


def test_estimate_needs_no_device(memfit: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = memfit("estimate", MODEL, *BATCH, "--device", "cuda")
    assert found.code == 0 and "meta device" in found.err
    assert memfit("plan", MODEL, "--budget", "1GiB", "--device", "cuda").code == 2


def test_a_plan_is_printed_saved_and_verified(memfit: Callable, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    table = tmp_path / "plan.csv"
    found = memfit("plan", MODEL, *BATCH, "--budget", "75%plain", "--save", path, "--csv", table)
    assert found.code == 0
    assert "block" in found.out and "later" in found.out
    assert found.last.startswith("Fits: ")
    assert all(word in found.last for word in ("predicted", "measured", "of ", "step time", "keep", "recompute"))
    assert next(csv.reader(table.open()))[:3] == ["block", "module", "saves"]

    verified = memfit("verify", MODEL, *BATCH, "--plan", path, "--json", tmp_path / "verify.json")
    document = json.loads((tmp_path / "verify.json").read_text())
    assert verified.code == 0 and verified.last.startswith("Exact: ")
    assert document["passed"] and document["differing"] == 0
    assert document["recomputes_executed"] == document["recomputes_planned"] > 0
    assert document["peak_measured_bytes"] <= document["budget_bytes"]
    assert {row["kind"] for row in document["rows"]} == {"loss", "gradient", "random state"}

    other = memfit("verify", "zoo:mlp?width=65&layers=3", *BATCH, "--plan", path)
    assert other.code == 2 and "PlanMismatchError" in other.err


def test_verify_fails_where_bits_differ(memfit: Callable, tmp_path: Path) -> None:
    (tmp_path / "fickle.py").write_text(
        "import itertools, torch\n"
        "from memfit.zoo import Example\n"
        "calls = itertools.count(1)\n"
        "def make(batch):\n"
        "    return Example(model=torch.nn.Linear(4, 4), args=(torch.ones(batch, 4),),\n"
        "                   loss_fn=lambda y: y.sum() * next(calls))\n"
    )
    found = memfit("verify", f"{tmp_path / 'fickle.py'}:make", "--budget", "50%")
    assert found.code == 1 and found.last.startswith("Not exact: ") and "differ" in found.last


def test_compare_prints_one_table_of_real_runs(memfit: Callable, tmp_path: Path) -> None:
    found = memfit(
        *("compare", MODEL, "--batch", "1024,4096", "--shape", "16", "--strategy", "none,auto"),
        *("--budget", "75%,1%", "--csv", "--json", tmp_path / "table.json"),
    )
    assert found.code == 0 and found.err.startswith("Fits: 4 of 6")
    rows = list(csv.DictReader(io.StringIO(found.out)))
    assert tuple(rows[0]) == COMPARISON_COLUMNS
    assert [(row["batch"], row["strategy"], row["fits"]) for row in rows] == [
        (batch, *rest) for batch in ("1024", "4096") for rest in (("none", "True"), ("auto", "True"), ("auto", "False"))
    ]
    for row in rows:
        if row["fits"] == "True":
            assert int(row["peak_after_measured_bytes"]) <= int(row["budget_bytes"] or 1 << 60)
            assert float(row["time_after_measured_seconds"]) > 0
            assert float(row["retained_activations_percent"]) + float(
                row["recomputed_activations_percent"]
            ) == pytest.approx(100, abs=0.01)
        else:
            assert int(row["least_bytes"]) > int(row["budget_bytes"]) and row["error"]
    document = json.loads((tmp_path / "table.json").read_text())
    assert document["kind"] == "comparison" and [r["batch"] for r in document["rows"]] == [
        int(r["batch"]) for r in rows
    ]


def test_compare_goes_through_sizes(memfit: Callable) -> None:
    options = ("--batch", "1,2", "--size", "32,64", "--strategy", "none,tile:2x1", "--no-measure", "--json")
    found = memfit("compare", TRUNK, *IMAGE, *options)
    rows = json.loads(found.out)["rows"]
    assert [(r["batch"], r["size"]) for r in rows[::2]] == [(1, 32), (1, 64), (2, 32), (2, 64)]
    peaks = {(r["batch"], r["size"]): r["peak_before_predicted_bytes"] for r in rows}
    assert peaks[1, 32] < peaks[1, 64] < peaks[2, 64]


def test_the_table_of_a_comparison_shows_predicted_over_measured(memfit: Callable) -> None:
    found = memfit("compare", MODEL, *BATCH, "--strategy", "auto", "--budget", "75%,1%", "--repeats", 1)
    lines = [line for line in found.out.splitlines() if " predicted " in line or " measured " in line]
    assert found.code == 0 and len(lines) == 3  # two for the row that fits, one for the other
    assert "does not fit" in found.out and "least " in found.out


def test_compare_does_not_fit_only_if_nothing_does(memfit: Callable) -> None:
    found = memfit("compare", MODEL, *BATCH, "--strategy", "auto", "--budget", "1%", "--no-measure")
    assert found.code == 1 and found.last.startswith("Does not fit: ") and "the least that works is" in found.last


def test_max_batch_finds_more_than_plain(memfit: Callable) -> None:
    model = "zoo:mlp?width=64&layers=2"
    found = memfit("max-batch", model, "--shape", "16", "--budget", "1MiB", "--json")
    document = json.loads(found.out)
    assert found.code == 0 and found.err.splitlines()[-1].startswith(f"Fits: batch {document['planned']} (")
    assert document["planned"] > document["plain"] > 0
    assert document["measured_peak_bytes"] <= document["budget_bytes"] == 1 << 20
    table = memfit("max-batch", model, "--shape", "16", "--budget", "2MiB", "--limit", 8, "--no-prove")
    assert table.code == 0 and "largest planned" in table.out


def test_demo_trains_twice_and_compares(memfit: Callable) -> None:
    pytest.importorskip("sklearn")
    found = memfit(
        *("demo", "--model", CLASSIFIER, "--batch", 64, "--size", 32, "--steps", 3),
        *("--percent", 97),
    )
    assert found.code == 0, found.err
    assert sum(line.rstrip().endswith(" equal") for line in found.out.splitlines()) == 3
    assert found.last.startswith("Fits: ") and "losses bitwise equal" in found.last
    assert memfit("demo", "--steps", 2).code == 2


def test_max_size_finds_more_than_plain(memfit: Callable) -> None:
    options = ("--batch", 1, "--budget", "2MiB", "--limit", 128, "--levers", "all", "--json")
    found = memfit("max-size", TRUNK, *IMAGE, *options)
    result = json.loads(found.out)
    assert result["kind"] == "largest size"
    assert result["measured_peak_bytes"] <= result["budget_bytes"]
    assert result["planned"] >= result["plain"]


def test_demo_tile_trains_on_whole_photographs(memfit: Callable) -> None:
    pytest.importorskip("sklearn")
    found = memfit("demo", "tile", "--steps", 3, "--scale", 0.2, "--tile-budget", "121MiB", "--times", 1)
    assert found.code == 0, found.err
    assert found.last.startswith("Fits: ") and "losses at full resolution equal up to rounding" in found.last
