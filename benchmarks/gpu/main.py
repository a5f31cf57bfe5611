"""What a planned step costs on a device: when its last kernel is launched, and when it is done.

python -m benchmarks.gpu.main --only torchvision:resnet50@64,hf:gpt2@8@512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.subject import Case, case_of
from memfit.capture.state.snapshot import preserved
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile, plan_captured
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.runtime.executable import compile_program
from memfit.sim.simulator import simulate_baseline
from memfit.tools.training_loop import training_step
from memfit.zoo import build

COLUMNS = ("model", "call", "host ms", "step ms", "predicted ms", "predicted overhead %", "runs again")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.main", description=__doc__)
    parser.add_argument("--only", default="torchvision:resnet50@64,hf:gpt2@8@512,zoo:vgg16-trunk@1@3x2048x2048")
    parser.add_argument("--budgets", default="110,60,40", help="in percent of the baseline peak")
    parser.add_argument("--repeats", type=int, default=8, metavar="N", help="interleaved steps of each that are timed")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for text in options.only.split(","):
        for row in _rows(case_of(text), list(map(int, options.budgets.split(","))), options.repeats, options.device):
            print(f"| {text} | {' | '.join(row)} |", flush=True)
        torch._dynamo.reset()


def _rows(case: Case, percents: list[int], repeats: int, where: str) -> list[tuple[str, ...]]:
    example = build(case.spec, batch=case.batch, shape=case.shape, device=where)
    model, args, kwargs = example.model, tuple(example.args), dict(example.kwargs)
    request = Request(budget=1, loss_fn=example.loss_fn, tiers="none")
    capture, graph = capture_and_profile(model, args, kwargs, request)
    plain = simulate_baseline(graph)
    calls: list[tuple[str, Callable[..., Any], Plan | None]] = [("plain", model, None)]
    for percent in percents:
        budget = plain.peak_bytes * percent // 100
        try:
            plan = plan_captured(model, args, kwargs, capture, graph, replace(request, budget=budget), budget)
        except BudgetError as error:
            print(f"{percent} %: {error}")
            continue
        calls.append((f"{percent} %", compile_program(model, capture, plan.program), plan))
    steps = [training_step(call, model, args, kwargs, loss_fn=example.loss_fn) for _, call, _ in calls]
    with preserved(model):
        for step in steps * 2:
            step()
        taken = [[_seconds(step, where) for step in steps] for _ in range(repeats)]
    rows: list[tuple[str, ...]] = []
    for (name, _, found), times in zip(calls, zip(*taken, strict=True), strict=True):
        host, whole = (statistics.median(t[place] for t in times) for place in (0, 1))
        predicted = plain.step_seconds if found is None else found.predicted.step_seconds
        more = ("", "") if found is None else _predicted(found)
        rows.append((name, f"{1e3 * host:.1f}", f"{1e3 * whole:.1f}", f"{1e3 * predicted:.1f}", *more))
    return rows


def _predicted(plan: Plan) -> tuple[str, str]:
    return f"{100 * plan.predicted.overhead:.1f}", str(len(plan.program.recomputed()))


def _seconds(step: Callable[[], object], where: str) -> tuple[float, float]:
    """Until the step returns, and until the device is done."""
    _wait(where)
    begin = time.perf_counter()
    step()
    returned = time.perf_counter()
    _wait(where)
    return returned - begin, time.perf_counter() - begin


def _wait(where: str) -> None:
    if where.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
