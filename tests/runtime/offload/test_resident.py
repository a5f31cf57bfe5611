"""What is swapped leaves the process's memory, as the operating system counts it, not only memfit's own counter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from torch import nn
import memfit
from memfit.runtime.offload import link_benchmark
from benchmarks.swap.resident import resident_growth

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for _ in range(8)))
x = torch.randn(1, 8, 512, 512)  # results of 8 MiB

def step():
    model(x).sum().backward()
    model.zero_grad()

step()
print(resident_growth(step))
link_benchmark._SECONDS = 0.02
fit = {"budget": int(sys.argv[1]), "loss_fn": torch.Tensor.sum, "tiers": "disk", "strategy": "swap", "prove": False}
memfit.fit(model, (x,), **fit)
assert memfit.plan_of(model).program.swapped()
print(memfit.plan_of(model).predicted.peak_bytes, memfit.plan_of(model).predicted.plain_peak_bytes)
step()
print(resident_growth(step))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak")
def test_the_resident_set_shrinks_with_the_peak(tmp_path: Path) -> None:
    def run(*words: str) -> list[int]:
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), *words],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},  # results always go back to the system
        ).stdout.split()
        return [int(word) for word in out]

    plain, predicted, predicted_baseline, planned = run(str(60 << 20))
    assert predicted < 0.6 * predicted_baseline
    # What is saved is saved for real, but for what malloc keeps and threads take.
    assert plain - planned > 0.8 * (predicted_baseline - predicted)
