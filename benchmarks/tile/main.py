"""What tiling is worth: the least budget with it and without it, and what the old least budget costs with it.

python -m benchmarks.tile.main --only resnet50 --tiers disk --grid 1,1,24 --write
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.overhead.cases import CASES
from benchmarks.report import Report, Table
from benchmarks.subject import Case, Run, Subject, case_of, measured_run
from memfit.capture.state.snapshot import preserved
from memfit.compiler.tolerance import in_float64, is_within_rounding, own_rounding
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.ir.tiers import TierLinks
from memfit.runtime.offload.tiers import tier_links
from memfit.tools.training_loop import interleaved_seconds
from memfit.zoo import build

DEFAULT = "resnet50,unet,vgg16"

WALL = (
    "model",
    "batch",
    "tiers",
    "baseline peak MiB",
    "parameters and gradients MiB",
    "least without tiling MiB",
    "least with tiling MiB",
    "share %",
    "share without parameters and gradients %",
    "measured peak with tiling MiB",
    "at the least without tiling: overhead without, profiled %",
    "with, profiled %",
    "baseline step, measured s",
    "without, measured s",
    "with, measured s",
    "gradients beyond rounding",
)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    table = report.table("The wall", WALL, keys=3)
    for name in options.only.split(","):
        case = CASES.get(name) or case_of(name)
        _wall(report, table, name if name in CASES else case.name, case, device, options)
        torch._dynamo.reset()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile.main", description=__doc__)
    parser.add_argument("--only", default=DEFAULT, help=f"names out of {', '.join(CASES)}, or SPEC@BATCH@SHAPE")
    parser.add_argument("--wall", type=int, default=3, metavar="N", help="interleaved steps of each that are timed")
    parser.add_argument("--cached", action="store_true", help="use the op costs known for this machine")
    parser.add_argument("--grid", default="1,1", help="tiles along height and width, and perhaps parts of the batch")
    parser.add_argument("--tiers", default="none", help="where the tiled steps may swap to, such as disk")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    return parser.parse_args(arguments)


def _wall(
    report: Report, table: Table, name: str, case: Case, device: torch.device, options: argparse.Namespace
) -> None:
    cut = tuple(map(int, options.grid.split(",")))
    bitwise, tiled = (Subject.of(case, device, cached=options.cached, grid=grid) for grid in ((), cut))
    tiers = tier_links(options.tiers, device)
    before, after = _least_bytes(bitwise), _least_bytes(tiled, tiers)
    plain = bitwise.run()
    _, low_run = tiled.proven(tiled.plan(after, tiers=tiers))
    without, _ = bitwise.proven(bitwise.plan(before))
    within, within_run = tiled.proven(tiled.plan(before, tiers=tiers))
    seconds = ["", "", ""]
    if options.wall:
        with preserved(bitwise.example.model), preserved(tiled.example.model):
            steps = [bitwise.step(), bitwise.step(without), tiled.step(within)]
            seconds = [f"{s:.2f}" for s in interleaved_seconds(steps, device, repeats=options.wall)]
    fixed = bitwise.graph.static_bytes + bitwise.graph.gradient_bytes
    exact = _exact(case, device)
    beyond = [n for run in (low_run, within_run) for n in _beyond_rounding(plain, run, exact)]
    report.add(
        *(
            table,
            name,
            str(case.batch),
            options.tiers,
            _mib(bitwise.plain.peak_bytes),
            _mib(fixed),
            _mib(before),
            _mib(after),
        ),
        f"{100 * after / before:.1f}",
        f"{100 * (after - fixed) / (before - fixed):.1f}",
        _mib(low_run.peak_bytes),
        *(_overhead(without), _overhead(within), *seconds),
        f"{len(beyond)} of {2 * sum(n.startswith('gradient') for n in plain.results)}",
    )


def _least_bytes(subject: Subject, tiers: Sequence[TierLinks] = ()) -> int:
    try:
        subject.plan(1, tiers=tiers)
    except BudgetError as error:
        return error.least_bytes
    raise AssertionError("a step fits one byte")


def _exact(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """What the baseline step makes in float64."""
    example = build(case.spec, batch=case.batch, shape=case.shape, device=device)
    model, args, kwargs = in_float64(example.model, example.args, example.kwargs)
    return measured_run(replace(example, model=model, args=args, kwargs=kwargs), model, device).results


def _beyond_rounding(plain: Run, found: Run, exact: dict[str, torch.Tensor]) -> list[str]:
    """Names of gradients that differ from the baseline step's by more than rounding."""
    gradients = [n for n in plain.results if n.startswith("gradient")]
    own = own_rounding({n: plain.results[n] for n in gradients}, {n: exact[n] for n in gradients})
    if own is None:
        exact = {}
    scale = float(torch.stack([plain.results[n].double().norm() for n in gradients]).norm())
    return [
        n
        for n in gradients
        if not is_within_rounding(plain.results[n], found.results[n], exact.get(n), scale=scale, own=own or 0.0)
    ]


def _overhead(plan: Plan) -> str:
    return f"{100 * plan.predicted.overhead:.1f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
