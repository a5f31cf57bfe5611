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


def ran(*words: str, budget: str = "") -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | ({"MEMFIT_BUDGET": budget} if budget else {})
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=300, cwd=SCRIPTS
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
    assert found.stderr.count("memfit: found Sequential") == 2


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
    script = tmp_path / "parent.py"
    code = "import sys; print('torch' in sys.modules, 'memfit.script.child' in sys.modules)"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n")
    found = by_memfit("1GiB", str(script))
    assert (found.returncode, found.stdout) == (0, "False True\n"), found.stderr


def test_a_budget_in_the_environment_is_enough() -> None:
    found = ran("language_model.py", budget="5MiB")
    assert (found.returncode, found.stdout.strip()) == (0, weights("language_model.py"))
    assert "memfit: found Model" in found.stderr and "memfit: Model: Fits: " in found.stderr
    nothing = ran("-c", "import torch; print('torch')", budget="5MiB")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "torch\n", "")


def test_commands_of_memfit_are_not_planned_although_a_budget_is_set() -> None:
    words = ("-m", "memfit", "verify", "zoo:mlp", "--budget", "1GiB", "--optimizer", "sgd")
    found = ran(*words, budget="1KiB")
    assert found.returncode == 0 and "memfit: found" not in found.stderr, found.stderr


def test_another_budget_than_that_of_the_environment_is_taken() -> None:
    found = ran("-m", "memfit", "run", "--budget", "1GiB", "language_model.py", budget="1KiB")
    assert (found.returncode, found.stdout.strip()) == (0, weights("language_model.py"))
    assert "within 1GiB" in found.stderr and "1KiB" not in found.stderr


HEAD = """
import threading
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
"""
LOOP = """
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(256, 256)).backward()
    optimizer.step()
print(sum(p.sum().item() for p in model.parameters()))
"""


def test_a_model_that_cannot_be_planned_runs_as_it_is_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "opaque.py"
    script.write_text(
        HEAD + "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.inner = nn.Linear(256, 256)\n"
        "    @torch.compiler.disable\n    def forward(self, x):\n        return self.inner(x).sum()\n" + LOOP
    )
    plain, found = ran(str(script)), by_memfit("0.3MiB", str(script))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert "cannot be planned" in found.stderr and "runs plainly" in found.stderr.replace("\n", " ")


DEEP = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = True
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)))
    def forward(self, x):
        for one in self.inner:
            x = CALL
        return x.sum()
"""


def test_a_model_that_checkpoints_itself_is_planned_as_if_it_did_not(tmp_path: Path) -> None:
    script = tmp_path / "checkpointed.py"
    script.write_text(HEAD + DEEP.replace("CALL", "checkpoint(one, x, use_reentrant=False)") + LOOP)
    plain, found = ran(str(script)), by_memfit("3.05MiB", str(script))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert "Model checkpoints itself; where it is planned, its plan takes the place of its checkpoints" in found.stderr
    assert "memfit: Model: Fits: " in found.stderr


def test_a_model_that_is_trained_in_another_thread_is_planned(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    body = LOOP.replace("\n", "\n    ").rstrip()
    script.write_text(
        HEAD + DEEP.replace("CALL", "one(x)") + "def train():" + body + "\n"
        "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n"
    )
    plain, found = ran(str(script)), by_memfit("3.05MiB", str(script))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert "memfit: Model: Fits: " in found.stderr


def test_a_model_whose_forward_is_called_directly_is_told(tmp_path: Path) -> None:
    script = tmp_path / "direct.py"
    script.write_text(HEAD + DEEP.replace("CALL", "one(x)") + LOOP.replace("model(torch", "model.forward(torch"))
    plain, found = ran(str(script)), by_memfit("3.05MiB", str(script))
    assert (found.returncode, found.stdout) == (0, plain.stdout), found.stderr
    assert found.stderr.count("the script calls Model.forward directly") == 1
    assert "found" not in found.stderr and "no training step" not in found.stderr
