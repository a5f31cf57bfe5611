"""How long the first step takes where the baseline step fits: plain, and fitted without inputs.

python -m benchmarks.loop.first_step --write

Each run is a process of its own; time counts from when everything is imported until the first step has ended.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.report import Report

HERE = Path(__file__).parent
SPECS = (
    "hf:gpt2?n_layer=6&n_embd=256&n_head=4@4",
    "torchvision:resnet50@8@3x96x96",
    "timm:vit_tiny_patch16_224@8",
    "zoo:unet@2@3x64x64",
)
COLUMNS = ("model", "plain, s", "fitted, s", "more, s")
RUNS = 5
ONE = """
import sys, time, torch, memfit, memfit.api
from benchmarks.subject import case_of
from memfit.zoo import build
case, fitted = case_of(sys.argv[1]), sys.argv[2] == "fitted"
example = build(case.spec, batch=case.batch, shape=case.shape)
model = example.model.train()
optimizer = torch.optim.AdamW(model.parameters())
begin = time.perf_counter()
if fitted:
    memfit.fit(model, budget="16GiB", optimizer=optimizer)
output = model(*example.args, **example.kwargs)
loss = output.loss if example.loss_fn is None else example.loss_fn(output)
loss.backward()
optimizer.step()
seconds = time.perf_counter() - begin
assert not fitted or memfit.plan_of(model).is_plain
print(seconds)
"""


def seconds(spec: str, how: str) -> float:
    """Time of the first step in a new process."""
    done = subprocess.run([sys.executable, "-c", ONE, spec, how], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    report = Report(HERE / "README.md", write=args.write, device=torch.device("cpu"))
    table = report.table("First step where the baseline step fits", COLUMNS)
    for spec in SPECS:
        turns = [(seconds(spec, "plain"), seconds(spec, "fitted")) for _ in range(RUNS)]
        plain, fitted = (statistics.median(column) for column in zip(*turns, strict=True))
        more = statistics.median(b - a for a, b in turns)
        report.add(table, spec, f"{plain:.2f}", f"{fitted:.2f}", f"{more:.2f}")


if __name__ == "__main__":
    main()
