"""`memfit pipeline` and `memfit compare pipeline`, run as a user would."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from memfit.cli import main
from memfit.pipelining.plan import decode_pipeline, encode_pipeline

_MODEL = "zoo:mlp?layers=3&width=16"
_QUICK = ("--schedule", "1f1b", "--checkpoint", "always")


def test_a_pipeline_is_planned_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, out = tmp_path / "schedule.svg", tmp_path / "plan.json"
    options = ["--stages", "2", "--microbatches", "4", "--schedule", "1f1b", "--optimizer", "adam"]
    assert main(["pipeline", _MODEL, *options, "--svg", str(svg), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 devices · 2 stages · 4 micro-batches of 2 · 1f1b" in said
    assert "peak of device 0" in said and "measured" in said
    assert "device 0 │0" in said and "b3" in said
    drawn = ElementTree.fromstring(svg.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 2 * 2 * 4
    document = json.loads(out.read_text())
    assert document.pop("kind") == "pipeline"
    assert encode_pipeline(decode_pipeline(document)) == document


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--stages", "2", "--microbatches", "2", *_QUICK, "--budget", "16KiB"], 1, "Does not fit"),
        (["--stages", "2", "--microbatches", "99"], 2, "99 micro-batches"),
        (["--stages", "2", "--microbatches", "2", "--schedule", "other"], 2, "unknown schedule"),
        (["--stages", "2", "--microbatches", "2", "--svg", "no/such/folder.svg"], 2, "no folder"),
    ],
)
def test_what_is_wrong_is_told(options: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", _MODEL, "--no-prove", *options]) == code
    assert told in capsys.readouterr().err


def test_pipelines_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.tools.compare_pipelines._TRIES", 1)
    model = "zoo:seed-gpt2?layers=2&width=8&heads=1&vocabulary=20&positions=8&dropout=0.0"
    table = tmp_path / "table.csv"
    rows: list[dict[str, str]] = []
    for more in (["--checkpoint", "on"], ["--checkpoint", "off", "--systems", "torchgpipe,equal-layers"]):
        options = ["--batch", "4", "--stages", "2", "--microbatches", "2", "--repeats", "1", "--csv", str(table)]
        assert main(["compare", "pipeline", model, *options, *more]) == 0
        assert ("memfit over the best other system" in capsys.readouterr().out) == (not rows)
        with table.open() as file:
            rows += csv.DictReader(file)
    assert [row["system"] for row in rows] == ["memfit", *["torchgpipe", "equal-layers"] * 2]
    losses = [float(row["loss"]) for row in rows]
    assert max(losses) - min(losses) < 1e-5
    assert all(int(row["peak_activation_bytes"]) > 0 for row in rows)
    rates = [float(row["samples_per_second"]) for row in rows]
    for place, row in enumerate(rows):  # of a single turn the ratio is that of the rates
        own = rates[0] / rates[place] if place in (1, 2) else 0.0
        assert float(row["memfit_speedup"]) == pytest.approx(own)


def test_compare_takes_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "zoo:mlp", "zoo:gpt"]) == 2
    assert "takes one model" in capsys.readouterr().err
