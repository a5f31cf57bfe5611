"""What swapping is worth: plans that may swap beside plans that only recompute, and the known strategies that swap.

python -m benchmarks.swap.main --only resnet50 --budgets 50,25 --write
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch

from benchmarks.overhead.cases import CASES
from benchmarks.report import Report, Table
from benchmarks.subject import Run, Subject, case_of, differing
from benchmarks.swap.resident import resident_growth
from memfit.capture.state.snapshot import preserved
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.ir.graph import Phase, StepGraph, StorageKind
from memfit.ir.plan_file import Prediction
from memfit.ir.tiers import Link, Tier, TierLinks
from memfit.runtime.offload.tiers import tier_links

DEFAULT = "resnet50,resnet152,gpt2"
BUDGETS = "75,50,33,25"
WAYS = ("recompute", "swap", "hybrid", "auto")
"""`recompute` is strategy auto without a tier."""

STEPS = (
    "model",
    "budget %",
    "strategy",
    "predicted peak MiB",
    "measured peak MiB",
    "resident set grows by, measured MiB",
    "on the tier MiB",
    "moved out + in MiB",
    "beside compute %",
    "stalls s",
    "overhead, profiled %",
    "relaxed bound %",
    "baseline step, profiled s",
    "step, profiled s",
    "baseline step, measured s",
    "step, measured s",
    "overhead, measured %",
    "tensors that differ",
)

LINKS = (
    "model",
    "budget %",
    "link MiB/s",
    "recompute alone: extra %",
    "with swaps: extra %",
    "of it stalls %",
    "removed %",
    "moved out MiB",
    "relaxed bound, alone %",
    "relaxed bound, with swaps %",
    "planning alone s",
    "planning with swaps s",
)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    steps, links = report.table("Budgets", STEPS, keys=3), report.table("A slow link, simulated", LINKS, keys=2)
    for name in options.only.split(","):
        case = CASES.get(name) or case_of(name)
        subject = Subject.of(case, device, cached=options.cached)
        shown = name if name in CASES else case.name
        if options.link_share:
            _simulated(report, links, shown, subject, options)
        else:
            _Bench(report, steps, shown, subject, options).run()
        torch._dynamo.reset()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap.main", description=__doc__)
    parser.add_argument("--only", default=DEFAULT, help=f"names out of {', '.join(CASES)}, or SPEC@BATCH@SHAPE")
    parser.add_argument("--budgets", default=BUDGETS, help="percent of the baseline peak")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"out of {', '.join(WAYS)}, or other strategies")
    parser.add_argument("--tiers", default=None, help="as for `memfit plan` (default: disk, on CUDA host)")
    parser.add_argument("--wall", type=int, default=5, metavar="N", help="interleaved steps of each that are timed")
    parser.add_argument("--cached", action="store_true", help="use the op costs known for this machine")
    parser.add_argument(
        "--link-share",
        type=float,
        default=0.0,
        help="instead: simulate a link of this share of compute's byte rate, recomputation alone and with swaps",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    return parser.parse_args(arguments)


class _Bench:
    """One model at all budgets in all ways."""

    def __init__(self, report: Report, table: Table, name: str, subject: Subject, options: argparse.Namespace) -> None:
        self.report, self.table, self.name, self.subject, self.options = report, table, name, subject, options
        tiers = options.tiers or ("host" if subject.device.type == "cuda" else "disk")
        self.tiers = tier_links(tiers, subject.device)

    def run(self) -> None:
        """Plans, runs and compares; the steps of one budget are timed in turns with the plain one."""
        plain = self.subject.run()
        grows = self._grows(None)
        self._row(
            "100", "plain", _mib(self.subject.plain.peak_bytes), _mib(plain.peak_bytes), grows, *[""] * 6, *[""] * 6
        )
        for budget in self.options.budgets.split(","):
            nbytes = int(plain.peak_bytes * float(budget) / 100)
            plans: list[tuple[str, Plan, Run]] = []
            for way in self.options.ways.split(","):
                try:
                    plan, run = self.subject.proven(self._plan(way, nbytes))
                    plans.append((way, plan, run))
                except BudgetError as error:
                    self._row(budget, way, f"does not fit, least {_mib(error.least_bytes)}", *[""] * 14)
            seconds = [0.0] * (len(plans) + 1)
            if self.options.wall:
                given = [None, *(plan for _, plan, _ in plans)]
                seconds = self.subject.seconds(given, repeats=self.options.wall)
            for (way, plan, run), took in zip(plans, seconds[1:], strict=True):
                self._planned(budget, way, plan, plain, run, seconds[0], took)

    def _plan(self, way: str, nbytes: int) -> Plan:
        if way == "recompute":
            return self.subject.plan(nbytes)
        return self.subject.plan(nbytes, strategy=way, tiers=self.tiers)

    def _planned(self, budget: str, way: str, plan: Plan, plain: Run, run: Run, before: float, after: float) -> None:
        p = plan.predicted
        names = differing(plain.results, run.results)
        self._row(
            *(budget, way, _mib(p.peak_bytes), _mib(run.peak_bytes), self._grows(plan)),
            _mib(p.host_bytes + p.disk_bytes) if p.out_bytes else "",
            f"{_mib(p.out_bytes)} + {_mib(p.in_bytes)}" if p.out_bytes else "",
            f"{100 * p.overlap:.0f}" if p.out_bytes else "",
            f"{p.stall_seconds:.2f}" if p.out_bytes else "",
            f"{100 * p.overhead:.1f}",
            "" if p.bound_overhead is None else f"{100 * p.bound_overhead:.1f}",
            *(f"{self.subject.plain.step_seconds:.2f}", f"{p.step_seconds:.2f}"),
            *((f"{before:.2f}", f"{after:.2f}", f"{100 * (after / before - 1):.1f}") if before else ("", "", "")),
            f"{len(names)} of {len(plain.results)}",
        )

    def _grows(self, plan: Plan | None) -> str:
        if self.subject.device.type == "cuda":
            return ""
        step = self.subject.step(plan)
        with preserved(self.subject.example.model):
            step()
            return _mib(resident_growth(step))

    def _row(self, *cells: str) -> None:
        self.report.add(self.table, self.name, *cells)


def byte_rate(graph: StepGraph) -> float:
    """Of compute: the bytes that the forward pass leaves for the backward pass, over its time."""
    read = {s for op in graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
    kept = sum(graph.storages[s].nbytes for s in read if graph.storages[s].kind is StorageKind.FORWARD)
    return kept / sum(graph.first_seconds()[: graph.loss_index])


def _simulated(report: Report, table: Table, name: str, subject: Subject, options: argparse.Namespace) -> None:
    """What a link of a share of compute's rate removes of what recomputation costs, all of it simulated."""
    graph = subject.graph
    link = Link(bytes_per_second=options.link_share * byte_rate(graph))
    tiers = (TierLinks(tier=Tier.HOST, out=link, into=link),)
    for budget in options.budgets.split(","):
        nbytes = int(subject.plain.peak_bytes * float(budget) / 100)
        (alone, alone_seconds), (hybrid, hybrid_seconds) = (_timed(subject, nbytes, to) for to in ((), tiers))
        before, after = (p.step_seconds / graph.seconds - 1 for p in (alone, hybrid))
        report.add(
            *(table, name, budget, f"{link.bytes_per_second / 2**20:.0f}"),
            *(f"{100 * before:.1f}", f"{100 * after:.1f}", f"{100 * hybrid.stall_seconds / graph.seconds:.1f}"),
            f"{100 * (1 - after / before):.0f}" if before > 0 else "",
            _mib(hybrid.out_bytes),
            *(f"{100 * _bound(graph, p):.1f}" for p in (alone, hybrid)),
            *(f"{alone_seconds:.1f}", f"{hybrid_seconds:.1f}"),
        )


def _bound(graph: StepGraph, predicted: Prediction) -> float:
    """The least extra time over the step with nothing recomputed."""
    assert predicted.bound_overhead is not None
    return (1 + predicted.bound_overhead) * graph.plain_seconds / graph.seconds - 1


def _timed(subject: Subject, nbytes: int, tiers: tuple[TierLinks, ...]) -> tuple[Prediction, float]:
    """What a plan is predicted to cost, and how long it took to find."""
    begin = time.perf_counter()
    return subject.plan(nbytes, tiers=tiers).predicted, time.perf_counter() - begin


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
