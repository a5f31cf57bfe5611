from __future__ import annotations

import json
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.coverage.main as coverage
import memfit
from benchmarks.coverage import trial as trials
from benchmarks.coverage.job import source
from benchmarks.coverage.script import STEPS, Fit, NotBuilt, Results, Sample, loss_of, results, seed_all, train
from benchmarks.coverage.trial import trial


def perceptron() -> Sample:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return Sample(model=model, args=(torch.randn(32, 8),))


def test_a_model_is_planned_exactly() -> None:
    row = trial(train(perceptron), judge_peak=True)
    assert row["status"] == "planned exactly", row
    assert row["share"] == 1.0 and row["subgraphs"] == 1
    assert row["planned_bytes"] <= row["budget_bytes"]


def test_a_graph_break_makes_subgraphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x).tanh()
            torch._dynamo.graph_break()
            return self.two(x).tanh()

    row = trial(train(lambda: Sample(model=Broken(), args=(torch.randn(64, 8),))), judge_peak=True)
    assert (row["status"], row["subgraphs"]) == ("planned in subgraphs", 2), row


def test_a_difference_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = memfit.fit

    def other(model: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        fit(model, *args, **kwargs)  # type: ignore[arg-type]
        with torch.no_grad():
            model[0].bias[0] = 0.5  # type: ignore[index]
        return model

    monkeypatch.setattr(trials.memfit, "fit", other)
    row = trial(train(perceptron), judge_peak=False)
    assert row["status"] == "wrong"
    assert row["reason"].startswith("fit changed 0.bias; step 0: ")


@pytest.mark.parametrize(
    ("error", "status"), [(memfit.CaptureError("no"), "refused"), (KeyError("val"), "crash"), (RuntimeError(), "crash")]
)
def test_errors(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(*_: object, **__: object) -> nn.Module:
        raise error

    monkeypatch.setattr(trials.memfit, "fit", fit)
    assert trial(train(perceptron), judge_peak=True)["status"] == status


def test_a_model_without_gradients_is_not_built() -> None:
    row = trial(
        train(lambda: Sample(model=nn.Linear(2, 2).requires_grad_(False), args=(torch.ones(1, 2),))), judge_peak=True
    )
    assert row["status"] == "not built"
    with pytest.raises(NotBuilt):
        loss_of({"count": 3})


def test_a_loop_that_is_not_deterministic_is_not_compared() -> None:
    calls: list[int] = []

    def script(fit: Fit) -> Iterator[Results]:
        model = fit(nn.Linear(2, 2), (torch.ones(1, 2),), loss_fn=torch.sum)
        for _ in range(STEPS):
            calls.append(1)
            model(torch.ones(1, 2))
            yield results(model, number=torch.tensor(len(calls)))

    assert trial(script, judge_peak=False)["reason"] == "the plain loop gives other bits the second time"


@pytest.mark.parametrize("name", list(source("scripts").names()))
def test_scripts_run_plain(name: str) -> None:
    """Twice, with the same bits, and the parameters move."""

    def run() -> list[Results]:
        seed_all(99)
        steps = source("scripts").script(name)(lambda model, *_, **__: model)
        return [{k: v.clone() for k, v in step.items()} for step in steps]

    first, second = run(), run()
    assert len(first) == STEPS
    assert not any(trials._different(a, b) for a, b in zip(first, second, strict=True))
    moved = [k for k in first[0] if k.startswith("parameter") and not torch.equal(first[0][k], first[-1][k])]
    assert moved and all(torch.isfinite(v).all() for v in first[-1].values() if v.is_floating_point())


def test_there_are_thirty_scripts() -> None:
    assert len(list(source("scripts").names())) >= 30


class Here:
    """Stands in for the worker: jobs run in this process, which has imported torch already."""

    def __init__(self, function: str, **_: object) -> None:
        self.call = pkgutil.resolve_name(function)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        logging.disable(logging.NOTSET)  # which a job does not undo


def test_rows_are_kept_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "rows.jsonl"
    kept = {"source": "scripts", "group": "losses", "name": "focal", "status": "crash", "reason": "a|b", "seconds": 1}
    to.write_text(json.dumps(kept) + "\n")
    monkeypatch.setattr(coverage, "Worker", Here)
    coverage.main(["--only", "scripts", "--match", "^(focal|policy_gradient)$", "--to", str(to)])
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in to.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["focal", "policy_gradient"]
    assert "| scripts: focal | crash | a\\|b |" in shown
    assert rows[1]["status"] in trials.STATUSES and "| scripts | adversaries | 1 |" in shown
