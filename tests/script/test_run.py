"""Scripts run unedited by `memfit run`, in processes of their own: the same weights, the script's exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_SEARCH_SECONDS": "0.1"}
ENVIRONMENT.pop("MEMFIT_PLAN", None)


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=300, cwd=SCRIPTS
    )


def by_memfit(budget: str, *words: str) -> subprocess.CompletedProcess[str]:
    return ran("-m", "memfit", "run", "--budget", budget, *words)


@cache
def weights(script: str) -> str:
    """The hash of the weights after a run without memfit."""
    found = ran(script)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_script_within_a_budget_where_plain_does_not_fit() -> None:
    found = by_memfit("5MiB", "language_model.py", "--compile", "--fail")
    assert found.returncode == 7
    assert found.stdout.strip() == weights("language_model.py")
    assert "torch.compile of Model is left out: its plan takes its place" in found.stderr
    assert "memfit: found Model" in found.stderr
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("memfit: Model: Fits: ") and "of 5.0 MiB" in last


def test_a_script_that_fits_runs_as_it_is() -> None:
    found = by_memfit("1GiB", "-m", "language_model")
    assert (found.returncode, found.stdout.strip()) == (0, weights("language_model.py"))
    assert "memfit: Model: Fits without a plan" in found.stderr and "capture" not in found.stderr


@pytest.mark.parametrize(
    "words", [("adversarial.py",), ("adversarial.py", "--child"), (sys.executable, "adversarial.py")]
)
def test_two_models_share_the_budget_also_in_a_child_process(words: tuple[str, ...]) -> None:
    found = by_memfit("8MiB", *words)
    assert (found.returncode, found.stdout.strip()) == (0, weights("adversarial.py")), found.stderr
    assert found.stderr.count("memfit: found Sequential") == 2 and "sitecustomize" not in found.stderr


def test_a_dry_run_stops_at_the_first_training_call() -> None:
    found = by_memfit("5MiB", "--dry-run", "language_model.py")
    assert (found.returncode, found.stdout) == (0, "")
    assert "memfit: Model: Fits: " in found.stderr


def test_a_budget_that_is_too_small_ends_the_script() -> None:
    found = by_memfit("1MiB", "language_model.py")
    assert found.returncode == 1 and found.stdout == ""
    assert "no plan fits 1.0 MiB; the least budget that works is" in found.stderr


def test_errors_of_the_script_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import logging\nlogging.basicConfig(format='own %(message)s')\nlogging.error('logged')\n1 / 0\n")
    found = by_memfit("1GiB", str(script))
    assert found.returncode == 1
    assert "own logged" in found.stderr and f'File "{script}", line 4' in found.stderr
    assert (
        "cli/run.py" not in found.stderr
        and "ZeroDivisionError" in found.stderr
        and "no training step was seen" in found.stderr
    )
    for words, message in ((["missing.py"], "no such script"), (["no-such-program"], "no program, of this name")):
        found = by_memfit("1GiB", *words)
        assert found.returncode == 2 and message in found.stderr


def test_the_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "def f(x: int): ...\nimport pickle, sys\nclass A: ...\n"
        "print(f.__annotations__['x'] is int, __name__, type(pickle.loads(pickle.dumps(A()))) is A, sys.argv[1:])\n"
    )
    found = by_memfit("1GiB", str(script), "--budget", "9")
    assert (found.returncode, found.stdout) == (0, "True __main__ True ['--budget', '9']\n")


def test_a_child_that_does_not_use_torch_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.hidden = 'ran'\n")
    script = tmp_path / "parent.py"
    code = "import sys; print('torch' in sys.modules, hidden)"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n")
    before = ENVIRONMENT.get("PYTHONPATH", "")
    ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(tmp_path)]))
    try:
        found = by_memfit("1GiB", str(script))
    finally:
        ENVIRONMENT["PYTHONPATH"] = before
    assert (found.returncode, found.stdout) == (0, "False ran\n"), found.stderr


def test_a_model_that_cannot_be_planned_runs_as_it_is_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "checkpointed.py"
    script.write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.inner = nn.Linear(512, 512)\n"
        "    def forward(self, x):\n        return checkpoint(self.inner, x, use_reentrant=False).sum()\n"
        "torch.manual_seed(0)\nmodel = Model()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(4, 512)).backward()\noptimizer.step()\n"
        "print('trained', model.inner.weight.sum().item() != 0)\n"
    )
    found = by_memfit("2MiB", str(script))
    assert (found.returncode, found.stdout) == (0, "trained True\n"), found.stderr
    assert "already checkpoints itself" in found.stderr and "runs plainly" in found.stderr.replace("\n", " ")
