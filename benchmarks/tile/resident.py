"""Whether the process's memory, as the operating system counts it, falls with the predicted peak.

python -m benchmarks.tile.resident --write

Each way runs in a process of its own, since what malloc holds of freed memory would count in the next one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import memfit
from benchmarks.report import Report
from benchmarks.swap.resident import resident_growth
from memfit.capture.loss.reading import backward_of
from memfit.zoo import build

COLUMNS = (
    "model",
    "batch",
    "shape",
    "way",
    "predicted peak MiB",
    "predicted beyond start MiB",
    "resident set grows by, measured MiB",
)

MODELS = (
    ("zoo:vgg16-trunk", 1, (3, 768, 768)),
    ("torchvision:vgg16", 16, (3, 224, 224)),
    ("zoo:gpt?layers=6&width=512&heads=8&positions=512", 16, (512,)),
)
SHARES = (0.5, 0.25)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="models by number: 0,2")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(_growth(**json.loads(options.child))))
        return
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=torch.device("cpu"))
    table = report.table("Resident set", COLUMNS, keys=4)
    chosen = range(len(MODELS)) if options.only is None else map(int, options.only.split(","))
    for spec, batch, shape in (MODELS[number] for number in chosen):
        for share in (None, *SHARES):
            found = _in_a_process(spec=spec, batch=batch, shape=shape, share=share)
            if found is None:
                continue
            way = "plain" if share is None else f"tiled, {share:.0%} of the baseline peak"
            cells = (_mib(found[name]) for name in ("peak", "beyond", "grown"))
            report.add(table, spec, batch, "×".join(map(str, shape)), way, *cells)


def _in_a_process(**facts: Any) -> dict[str, int] | None:
    command = [sys.executable, "-m", "benchmarks.tile.resident", "--child", json.dumps(facts)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        print(run.stderr.splitlines()[-1], file=sys.stderr)
        return None
    found: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return found


def _growth(spec: str, batch: int, shape: list[int], share: float | None) -> dict[str, int]:
    """What is predicted and what the resident set grows by in one step, gradients made anew."""
    example = build(spec, batch=batch, shape=tuple(shape))
    model, args, loss_fn = example.model, tuple(example.args), example.loss_fn
    plan = memfit.plan(model, args, example.kwargs, budget="auto", loss_fn=loss_fn, prove=False)
    baseline_bytes = plan.predicted.plain_peak_bytes
    if share is not None:
        budget = int(share * baseline_bytes)
        plan = memfit.plan(model, args, example.kwargs, budget=budget, loss_fn=loss_fn, levers="all", prove=False)
        plan.apply(model)
    assert plan.planned is not None
    start, peak = plan.planned.graph.static_bytes, baseline_bytes if share is None else plan.predicted.peak_bytes
    del plan

    def step() -> None:
        backward_of(model(*args, **example.kwargs), loss_fn)
        model.zero_grad()

    step()
    return {"peak": peak, "beyond": peak - start, "grown": resident_growth(step)}


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
