import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memfit.cli
from memfit.report.progress import progress_bars

SMALL = ("zoo:mlp?width=8&layers=1", "--shape", "4")


def test_help_is_there_for_every_command(memfit: Callable) -> None:
    top = memfit("--help")
    assert top.code == 0 and "exit codes:" in top.out
    for command in memfit_commands():
        found = memfit(command, "--help")
        assert found.code == 0 and found.out.startswith(f"usage: memfit {command}")
        assert command in top.out


def memfit_commands() -> list[str]:
    return list(memfit.cli.COMMANDS)


def test_help_does_not_import_torch() -> None:
    code = "import sys; from memfit.cli import main; main(['plan', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=60).returncode == 0


def test_the_package_can_be_run() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "memfit", "plan", "--help"], check=False, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and "--budget" in found.stdout


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fit",),
        ("plan",),
        ("plan", *SMALL),
        ("plan", *SMALL, "--budget", "much"),
        ("plan", *SMALL, "--budget", "0"),
        ("plan", *SMALL, "--budget", "40%plains"),
        ("plan", *SMALL, "--budget", "xplain"),
        ("plan", *SMALL, "--budget", "1GiB", "--batch", "0"),
        ("plan", *SMALL, "--budget", "1GiB", "--dtype", "float31"),
        ("plan", *SMALL, "--budget", "1GiB", "--optimizer", "adamm"),
        ("plan", *SMALL, "--budget", "1GiB", "--strategy", "nonesuch"),
        ("plan", *SMALL, "--budget", "1GiB", "--save", "/nonexistent/plan.json"),
        ("plan", "zoo:nonesuch", "--budget", "1GiB"),
        ("plan", "nofile.py:make", "--budget", "1GiB"),
        ("verify", *SMALL),
        ("verify", *SMALL, "--budget", "1GiB", "--plan", "plan.json"),
        ("verify", *SMALL, "--plan", "/nonexistent/plan.json"),
        ("compare", *SMALL, "--budget", "4parsecs"),
        ("compare", *SMALL, "--strategy", "nonesuch"),
        ("compare", *SMALL, "--csv", "--json", "/nonexistent/x.json"),
        ("max-batch", *SMALL, "--budget", "1GiB", "--start", "9", "--limit", "8"),
    ],
)
def test_bad_input_is_one_line_and_code_2(memfit: Callable, words: tuple[str, ...]) -> None:
    found = memfit(*words)
    assert found.code == 2
    assert found.out == "" and "Traceback" not in found.err
    if not found.err.startswith("usage:"):
        assert found.err.startswith("memfit: ") and found.err.count("\n") == 1


def test_json_and_csv_cannot_share_stdout(memfit: Callable) -> None:
    found = memfit("compare", *SMALL, "--json", "--csv")
    assert found.code == 2 and json.loads(found.out)["error"] == "SpecError"


def test_what_does_not_fit_is_code_1_with_the_least_budget(memfit: Callable) -> None:
    found = memfit("plan", *SMALL, "--budget", "100", "--json")
    least = json.loads(found.out)["least_bytes"]
    assert found.code == 1 and found.err.startswith("Does not fit: ") and str(least) in found.err
    assert memfit("plan", *SMALL, "--budget", least, "--no-prove").code == 0


def test_a_damaged_plan_file_is_refused(memfit: Callable, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema_version": 1, "program": "import os"}')
    found = memfit("verify", *SMALL, "--plan", tmp_path / "plan.json")
    assert found.code == 2 and "PlanFileError" in found.err


def test_a_model_that_cannot_be_captured_is_code_2(memfit: Callable, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef make(batch):\n    return torch.nn.Linear(4, 4).eval(), (torch.ones(batch, 4),)\n"
    )
    found = memfit("plan", f"{tmp_path / 'model.py'}:make", "--budget", "50%")
    assert found.code == 2 and "CaptureError" in found.err


def test_other_errors_are_code_3_and_verbose_says_where(memfit: Callable, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def make():\n    raise KeyError('mine')\n")
    spec = f"{tmp_path / 'model.py'}:make"
    found = memfit("estimate", spec)
    assert found.code == 3 and found.err == "memfit: KeyError: 'mine'\n"
    assert memfit("estimate", spec, "-v").code == 3


def test_interrupting_is_code_130(memfit: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.zoo.build", stop)
    found = memfit("estimate", *SMALL)
    assert found.code == 130 and found.err == "memfit: interrupted\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_cannot_be_written_is_code_2(memfit: Callable, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert memfit("estimate", *SMALL, "--json", tmp_path / "x.json").code == 2


@pytest.mark.parametrize("name", ["none", "sgd", "momentum", "adam", "AdamW", "adagrad"])
def test_optimizers_by_name(memfit: Callable, name: str) -> None:
    found = memfit("estimate", *SMALL, "--optimizer", name, "--json")
    state = {row["kind"]: row["predicted_bytes"] for row in json.loads(found.out)["rows"]}["optimizer"]
    assert found.code == 0 and (state > 0) == (name not in ("none", "sgd"))


def test_progress_bars_are_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as progress:
        progress("plan", 0, 1)
    with progress_bars(enabled=True) as progress:
        progress("profile", 0, 2)
        progress("profile", 2, 2)
        progress("profile", 0, 3)
        progress("plan", 0, 1)
        progress("plan (variations, best so far +4.8% step time)", 3, 32)
    out, err = capsys.readouterr()
    assert out == "" and "profile" in err and "plan (variations" in err
