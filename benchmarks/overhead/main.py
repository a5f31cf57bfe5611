"""What a budget costs: overhead, bound, peaks and bits for each model at each budget.

python -m benchmarks.overhead.main --only resnet50 --budgets 50,33 --write
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
from msgspec.structs import replace

from benchmarks.overhead.cases import CASES, EXTRA_BUDGETS, HEADLINE
from benchmarks.report import Report, Table
from benchmarks.subject import Run, Subject, case_of, differing
from memfit.errors import BudgetError, MemfitError
from memfit.fitted.plan import Plan
from memfit.planner.bounds.lower_bound import widest_op_bytes

BUDGETS = "80,60,50,33,25,least"

MODELS = (
    "model",
    "spec",
    "batch",
    "ops",
    "baseline peak, predicted MiB",
    "baseline peak, measured MiB",
    "activations, share of the peak",
    "widest op, share of the peak",
    "with kernel workspace",
    "least budget / widest op",
    "capture s",
    "profiling, in baseline steps",
)

STEPS = (
    "model",
    "budget %",
    "budget MiB",
    "predicted peak MiB",
    "measured peak MiB",
    "budget used %",
    "overhead, profiled %",
    "relaxed bound %",
    "gap, points",
    "overhead, wall clock %",
    "tensors that differ",
    "planning s",
)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    models, steps = report.table("Models", MODELS), report.table("Budgets", STEPS, keys=2)
    for name in options.only.split(","):
        try:
            _Bench(name, device, report, models, steps, options).run()
        except MemfitError as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        torch._dynamo.reset()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.main", description=__doc__)
    parser.add_argument(
        "--only", default=",".join(HEADLINE), help=f"names out of {', '.join(CASES)}, or SPEC@BATCH@SHAPE"
    )
    parser.add_argument("--budgets", default=BUDGETS, help="percent of the baseline peak, or `least`")
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="capture, profile and plan only")
    parser.add_argument("--wall", type=int, default=0, metavar="N", help="also time N interleaved steps of each")
    parser.add_argument("--cached", action="store_true", help="use the op costs known for this machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    return parser.parse_args(arguments)


class _Bench:
    """One model at all budgets."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        report: Report,
        models: Table,
        steps: Table,
        options: argparse.Namespace,
    ) -> None:
        self.case = CASES.get(name) or case_of(name)
        self.name = name if name in CASES else self.case.name
        self.report, self.models, self.steps, self.options = report, models, steps, options
        self.subject = Subject.of(self.case, device, cached=options.cached)
        self.plain: Run | None = None
        self.rows: list[tuple[Plan, list[str]]] = []

    def run(self) -> None:
        subject, measure = self.subject, self.options.measure
        plain_seconds = 0.0
        if measure:
            self.plain = subject.run()
            (plain_seconds,) = subject.seconds([None])
        whole = self.plain.peak_bytes if self.plain else subject.plain.peak_bytes
        bare = tuple(replace(op, workspace_bytes=0, variants=()) for op in subject.graph.ops)
        wall = widest_op_bytes(replace(subject.graph, ops=bare))
        budgets = [b for b in (*self.options.budgets.split(","), *EXTRA_BUDGETS.get(self.name, ())) if b]
        least = self._least(wall) if "least" in budgets else None
        self.report.add(
            self.models,
            self.name,
            f"`{self.case.spec}`",
            self.case.batch,
            len(subject.graph.ops),
            _mib(subject.plain.peak_bytes),
            _mib(self.plain.peak_bytes) if self.plain else "",
            f"{(subject.plain.forward_end_bytes - subject.graph.static_bytes) / whole:.3f}",
            f"{wall / whole:.3f}",
            f"{widest_op_bytes(subject.graph) / whole:.3f}",
            f"{least / wall:.3f}" if least else "",
            f"{subject.capture_seconds:.1f}",
            f"{subject.profile_seconds / plain_seconds:.1f}" if plain_seconds and not self.options.cached else "",
        )
        for budget in budgets:
            amount = least if budget == "least" else int(whole * float(budget) / 100)
            if amount is not None:
                self._budget(budget, amount)
        if self.options.wall and measure:
            self._wall_clock()

    def _least(self, wall_bytes: int) -> int | None:
        """The least budget the planner offers to someone who asks for too little."""
        try:
            return self.subject.plan(wall_bytes).budget_bytes
        except BudgetError as error:
            return error.least_bytes

    def _budget(self, label: str, budget_bytes: int) -> None:
        begin = time.perf_counter()
        try:
            plan = self.subject.plan(budget_bytes)
            planning = time.perf_counter() - begin
            run = None
            if self.plain is not None:
                plan, run = self.subject.proven(plan)
        except BudgetError as error:
            reason = f"does not fit, least {_mib(error.least_bytes)}"
            self._row(label, budget_bytes, reason, *[""] * 7, f"{time.perf_counter() - begin:.1f}")
            return
        bound = plan.predicted.bound_overhead or 0.0
        cells = [
            _mib(plan.predicted.peak_bytes),
            _mib(run.peak_bytes) if run else "",
            f"{100 * (run.peak_bytes if run else plan.predicted.peak_bytes) / budget_bytes:.1f}",
            f"{100 * plan.predicted.overhead:.2f}",
            f"{100 * bound:.2f}",
            f"{100 * (plan.predicted.overhead - bound):.2f}",
            "",
            _difference(self.plain, run),
            f"{planning:.1f}",
        ]
        self._row(label, budget_bytes, *cells)
        self.rows.append((plan, [label, _mib(budget_bytes), *cells]))

    def _row(self, label: str, budget_bytes: int, *cells: str) -> None:
        self.report.add(self.steps, self.name, label, _mib(budget_bytes), *cells)

    def _wall_clock(self) -> None:
        """Runs the plain and all planned steps in turns and completes the rows."""
        plain, *planned = self.subject.seconds([None, *(plan for plan, _ in self.rows)], repeats=self.options.wall)
        for (_, cells), seconds in zip(self.rows, planned, strict=True):
            cells[8] = f"{100 * (seconds / plain - 1):.1f}"
            self.report.add(self.steps, self.name, *cells)


def _difference(plain: Run | None, run: Run | None) -> str:
    if plain is None or run is None:
        return ""
    names = differing(plain.results, run.results)
    return f"{len(names)} of {len(plain.results)}" + (f": {', '.join(names[:2])}" if names else "")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
