from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.report import MARKER, Report

CPU = torch.device("cpu")
COLUMNS = ("model", "peak")


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# Before\n\n{MARKER}\n{MARKER}\n\nAfter\n")
    return path


def test_rows_stand_between_the_markers(readme):
    report = Report(readme, write=True, device=CPU)
    report.add(report.table("Models", COLUMNS), "a", 1)
    before, body, after = readme.read_text().split(MARKER)
    assert (before, after) == ("# Before\n\n", "\n\nAfter\n")
    assert "| model | peak |\n| --- | --- |\n| a | 1 |" in body
    assert f"torch {torch.__version__}" in body


def test_a_second_run_replaces_its_rows_and_keeps_the_others(readme):
    for peaks in ({"a": 1, "b": 2}, {"b": 3, "c": 4}):
        report = Report(readme, write=True, device=CPU)
        models, _ = report.table("Models", COLUMNS), report.table("Other", ("x",))
        for model, peak in peaks.items():
            report.add(models, model, peak)
    assert "| a | 1 |\n| b | 3 |\n| c | 4 |" in readme.read_text()


def test_a_table_with_other_columns_starts_anew(readme):
    for columns in (COLUMNS, ("model", "seconds")):
        report = Report(readme, write=True, device=CPU)
        report.add(report.table("Models", columns), columns[1], 1)
    assert "peak" not in readme.read_text()


def test_without_write_the_readme_stays(readme, capsys):
    before = readme.read_text()
    report = Report(readme, write=False, device=CPU)
    report.add(report.table("Models", COLUMNS), "a", 1)
    assert readme.read_text() == before
    assert "| a | 1 |" in capsys.readouterr().out


def test_tables_of_other_runs_stay_with_where_they_were_measured(readme):
    before, _, after = readme.read_text().split(MARKER)
    old = "another machine\n\n### Old\n\n| x |\n| --- |\n| 1 |\n"
    readme.write_text(f"{before}{MARKER}\n\n{old}\n{MARKER}{after}")
    for title in ("Models", "More"):
        report = Report(readme, write=True, device=CPU)
        report.add(report.table(title, COLUMNS), "a", 1)
    text = readme.read_text()
    assert "### Old\n\nanother machine\n\n| x |\n| --- |\n| 1 |" in text
    assert text.count("another machine") == 1 and text.count("### ") == 3
    assert text.count(f"torch {torch.__version__}") == 2
