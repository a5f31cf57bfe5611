"""What planning itself takes: capture, profiling, planning, compiling, and what a fitted step adds to a plain one.

python -m benchmarks.planning.main --only gpt2-48 --budgets 50
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from pathlib import Path

import torch

from benchmarks.report import Report, Table
from benchmarks.subject import Case, Subject, case_of
from memfit.capture.state.snapshot import preserved
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.tools.training_loop import interleaved_seconds, training_step

CASES: dict[str, Case] = {
    "resnet152": Case(spec="torchvision:resnet152", batch=16, shape=(3, 224, 224)),
    "gpt2-48": Case(spec="hf:gpt2?n_layer=48&n_embd=256&n_head=4&vocab_size=1024", batch=4, shape=(256,)),
}

FITTED: dict[str, Case] = {
    "resnet50": Case(spec="torchvision:resnet50", batch=8, shape=(3, 224, 224)),
    "resnet50-tiny": Case(spec="torchvision:resnet50", batch=2, shape=(3, 32, 32)),
}

PLANNING = (
    "model",
    "budget % of the baseline peak",
    "ops",
    "capture s",
    "profiling s",
    "profiling, in baseline steps",
    "planning s",
    "compiling s",
    "overhead of the plan, profiled %",
    "relaxed bound %",
)

PER_STEP = (
    "model",
    "batch",
    "baseline step ms",
    "fitted step ms",
    "difference ms",
    "difference %",
)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    planning = report.table("Planning", PLANNING, keys=2)
    per_step = report.table("A fitted step at 100 % of the baseline peak", PER_STEP)
    for name in options.only.split(","):
        if name not in FITTED:
            _planning(name, CASES.get(name) or case_of(name), device, report, planning, options)
        if name in FITTED or options.fitted:
            case = FITTED.get(name) or case_of(name)
            _per_step(name if name in FITTED else case.name, case, device, report, per_step, options)
        torch._dynamo.reset()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = (*CASES, *FITTED)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.main", description=__doc__)
    parser.add_argument("--only", default=",".join(names), help=f"names out of {', '.join(names)}, or SPEC@BATCH@SHAPE")
    parser.add_argument("--budgets", default="80,50,33,25", help="percent of the baseline peak")
    parser.add_argument("--repeats", type=int, default=15, help="interleaved steps of each that are timed")
    parser.add_argument("--fitted", action="store_true", help="also time fitted steps of the models given by spec")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    return parser.parse_args(arguments)


def _planning(
    name: str, case: Case, device: torch.device, report: Report, table: Table, options: argparse.Namespace
) -> None:
    name = name if name in CASES else case.name
    subject = Subject.of(case, device)
    subject.seconds([None])
    (plain_seconds,) = subject.seconds([None])
    for budget in options.budgets.split(","):
        begin = time.perf_counter()
        try:
            plan = subject.plan(int(subject.plain.peak_bytes * float(budget) / 100))
        except BudgetError as error:
            least = f"none, least {100 * error.least_bytes / subject.plain.peak_bytes:.1f} %"
            cells = ["", least, ""]
            planned = time.perf_counter() - begin
        else:
            planned = time.perf_counter() - begin
            first, second = (subject.seconds([plan])[0] for _ in range(2))
            cells = [
                f"{first - second:.1f}",
                f"{100 * plan.predicted.overhead:.2f}",
                f"{100 * (plan.predicted.bound_overhead or 0.0):.2f}",
            ]
        report.add(
            table,
            name,
            budget,
            len(subject.graph.ops),
            f"{subject.capture_seconds:.1f}",
            f"{subject.profile_seconds:.1f}",
            f"{subject.profile_seconds / plain_seconds:.1f}",
            f"{planned:.1f}",
            *cells,
        )


def _per_step(
    name: str, case: Case, device: torch.device, report: Report, table: Table, options: argparse.Namespace
) -> None:
    """Times the module as `memfit.fit` leaves it beside a plain copy."""
    subject = Subject.of(case, device, cached=True)
    example, plan = subject.example, subject.plan(subject.plain.peak_bytes)
    assert not plan.program.recomputed()
    fitted = Plan.of(plan).apply(copy.deepcopy(example.model))
    steps = [
        training_step(model, model, example.args, example.kwargs, loss_fn=example.loss_fn)
        for model in (example.model, fitted)
    ]
    with preserved(example.model):
        interleaved_seconds(steps, device, repeats=2)
        plain, ours = interleaved_seconds(steps, device, repeats=options.repeats)
    report.add(
        table,
        name,
        case.batch,
        f"{1e3 * plain:.1f}",
        f"{1e3 * ours:.1f}",
        f"{1e3 * (ours - plain):+.1f}",
        f"{100 * (ours / plain - 1):+.1f}",
    )


if __name__ == "__main__":
    main()
