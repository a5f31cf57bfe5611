"""torchtitan with `BudgetAC`: the weights of a run without it, in shards, with the state of the optimizer counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.errors import SpecError

SCRIPT = Path(__file__).parent / "scripts" / "torchtitan_llama.py"
MiB = 2**20


def ran(policy: str, folder: Path) -> tuple[str, int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), policy], cwd=folder, env=dict(os.environ), capture_output=True, text=True
    )
    found = re.search(r"^weights (\w+) (\d+) (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stderr[-2000:]
    return found[1], int(found[2]), found[3]


def test_the_weights_are_those_without_the_policy(tmp_path: Path) -> None:
    plain, parameters, _ = ran("none", tmp_path)
    planned, _, summary = ran("70MiB", tmp_path)
    assert planned == plain
    predicted = float(re.search(r"Fits: ([\d.]+) MiB predicted", summary)[1])  # type: ignore[index]
    assert 4 * 4 * parameters < predicted * MiB <= 70 * MiB  # parameters, gradients and two tensors of state
    assert not summary.endswith("recompute 0).")


def test_a_budget_that_is_none_is_refused() -> None:
    from torch import nn

    from memfit.integrations.torchtitan import BudgetAC

    with pytest.raises(SpecError, match="budget"):
        BudgetAC.Config(budget="much").build().apply(nn.Linear(2, 2))
