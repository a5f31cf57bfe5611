"""memfit against what a user would pick instead: at each alternative's measured peak, who is faster, and who is right.

python -m benchmarks.peers.main --only gpt --wall 0
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.peers.prices import executed_seconds
from benchmarks.peers.rivals import Rival, rivals_of
from benchmarks.report import Report, Table
from benchmarks.subject import Case, Run, Subject, case_of, differing, measured_run
from memfit.capture.state.snapshot import preserved
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.tools.training_loop import interleaved_seconds, training_step

CASES: dict[str, Case] = {
    "resnet50": Case(spec="torchvision:resnet50", batch=8, shape=(3, 160, 160)),
    "mobilenet_v2": Case(spec="torchvision:mobilenet_v2", batch=8, shape=(3, 160, 160)),
    "gpt": Case(spec="zoo:gpt?layers=12&width=192&dropout=0.1", batch=8, shape=(128,)),
}

COLUMNS = (
    "model",
    "peer",
    "peer's peak, measured MiB",
    "memfit's peak, measured MiB",
    "peer's step, profiled s",
    "memfit's step, profiled s",
    "memfit / peer, profiled",
    "memfit / peer, wall clock",
    "peer's gradients",
    "peer's buffers",
    "memfit's bits",
)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    table = report.table("Peers", COLUMNS, keys=2)
    for name in options.only.split(","):
        _Bench(name, device, report, table, options).run()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.main", description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help=f"names out of {', '.join(CASES)}, or SPEC@BATCH@SHAPE")
    parser.add_argument("--peers", default="", help="only peers whose names contain one of these words")
    parser.add_argument("--wall", type=int, default=5, metavar="N", help="interleaved steps of each that are timed")
    parser.add_argument("--cached", action="store_true", help="use the op costs known for this machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    return parser.parse_args(arguments)


class _Bench:
    """One model against all its peers."""

    def __init__(
        self, name: str, device: torch.device, report: Report, table: Table, options: argparse.Namespace
    ) -> None:
        case = CASES.get(name) or case_of(name)
        self.name = name if name in CASES else case.name
        self.report, self.table, self.options = report, table, options
        self.subject = Subject.of(case, device, cached=options.cached)
        self.plain = self.subject.run()

    def run(self) -> None:
        plain = Rival(name="none, eager", model=self.subject.example.model, call=self.subject.example.model)
        self._row(plain)
        words = [word for word in self.options.peers.split(",") if word]
        for rival in rivals_of(self.subject.example.model):
            if not words or any(word in rival.name for word in words):
                torch._dynamo.reset()
                self._row(rival)

    def _row(self, rival: Rival) -> None:
        subject = self.subject
        example = replace(subject.example, model=rival.model)
        try:
            run = measured_run(example, rival.call, subject.device)
        except RuntimeError as error:  # whatever a peer refuses is a result
            self._add(rival.name, *[""] * 6, f"refused: {_first_line(error)}", *[""] * 2)
            return
        with preserved(rival.model):
            seconds = executed_seconds(
                rival.call, example.args, example.kwargs, example.loss_fn, subject.costs, subject.device
            )
        correct = (_gradients(self.plain, run), _buffers(self.plain, run))
        try:
            plan, own = subject.proven(subject.plan(run.peak_bytes))
        except BudgetError as error:
            least = f"does not fit, least {_mib(error.least_bytes)}"
            self._add(rival.name, _mib(run.peak_bytes), least, f"{seconds:.3f}", "", "", "", *correct, "")
            return
        names = differing(self.plain.results, own.results)
        self._add(
            rival.name,
            _mib(run.peak_bytes),
            _mib(own.peak_bytes),
            f"{seconds:.3f}",
            f"{plan.predicted.step_seconds:.3f}",
            f"{plan.predicted.step_seconds / seconds:.3f}",
            self._wall_clock(rival, plan),
            *correct,
            "equal" if not names else f"{len(names)} differ: {names[0]}",
        )

    def _add(self, *cells: str) -> None:
        self.report.add(self.table, self.name, *cells)

    def _wall_clock(self, rival: Rival, plan: Plan) -> str:
        if not self.options.wall:
            return ""
        example = self.subject.example
        peer = training_step(rival.call, rival.model, example.args, example.kwargs, loss_fn=example.loss_fn)
        with preserved(example.model), preserved(rival.model):
            theirs, ours = interleaved_seconds(
                [peer, self.subject.step(plan)], self.subject.device, repeats=self.options.wall
            )
        return f"{ours / theirs:.3f}"


def _gradients(plain: Run, run: Run) -> str:
    """Equal, or the largest relative error of a gradient; rounding is about 1e-6, wrong is much more."""
    errors = [
        float((run.results[n].double() - g.double()).norm() / g.double().norm().clamp_min(1e-30))
        for n, g in plain.results.items()
        if n.startswith("gradient ") and n in run.results
    ]
    names = [n for n in differing(plain.results, run.results) if n.startswith("gradient ")]
    if not names:
        return "equal"
    missing = any((n in plain.results) != (n in run.results) for n in names)
    worst = max(errors, default=0.0)
    verdict = "MISSING" if missing else "WRONG" if worst > 1e-3 else "rounding"
    return f"{verdict}: up to {worst:.1e} off in {len(names)} of {len(errors)}"


def _buffers(plain: Run, run: Run) -> str:
    names = [n for n in differing(plain.results, run.results) if n.startswith("buffer ")]
    if not names:
        return "equal" if any(n.startswith("buffer ") for n in plain.results) else "none"
    twice = [n for n in names if n.endswith("num_batches_tracked") and int(run.results[n]) == 2]
    return f"{len(names)} differ" + (f", {len(twice)} BatchNorms updated twice" if twice else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120].replace("|", "/")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
