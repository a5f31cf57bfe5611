"""Seed 000's table: VGG-16's trunk on one image, forward and backward seconds and the peak, by size and strategy.

python -m benchmarks.tile.seed000 --sizes 512,1024 --write

Beside plain training stand `torch.utils.checkpoint.checkpoint_sequential` with five segments, fixed grids that run as
few ops apart as they can (`tile:HxW`, what the seed's system does), and memfit with all levers at the measured peaks of
the first two and at shares of the plain one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.report import Report, Table
from benchmarks.subject import measured_run
from memfit.capture.state.snapshot import preserved
from memfit.compiler.driver import plan_profiled
from memfit.compiler.request import Request
from memfit.compiler.stages import capture_and_profile
from memfit.errors import BudgetError
from memfit.fitted.plan import Plan
from memfit.runtime.executable import compile_program
from memfit.zoo import Example, build

COLUMNS = (
    "size",
    "strategy",
    "forward s",
    "backward s",
    "total s",
    "over plain",
    "peak MiB",
    "predicted peak MiB",
    "predicted overhead %",
)
_NO_BUDGET = 1 << 60


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    where = "" if device.type == "cpu" else f" on {torch.cuda.get_device_name(device)}"
    table = report.table(f"Seed 000: VGG-16's trunk, one image{where}", COLUMNS, keys=2)
    for size in map(int, options.sizes.split(",")):
        _table(report, table, device, size, options)
        torch._dynamo.reset()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile.seed000", description=__doc__)
    parser.add_argument("--model", default="zoo:vgg16-trunk", metavar="SPEC", help="for images of three channels")
    parser.add_argument("--sizes", default="512,1024", help="pixels of a side")
    parser.add_argument("--grids", default="1x1,2x2,4x4", help="of fixed tiles")
    parser.add_argument("--shares", default="50,35", help="budgets of memfit, in percent of the baseline peak, besides")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="interleaved steps of each that are timed")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    return parser.parse_args(arguments)


def _table(report: Report, table: Table, device: torch.device, size: int, options: argparse.Namespace) -> None:
    example = build(options.model, batch=1, shape=(3, size, size), device=device)
    calls: list[tuple[str, Callable[..., Any], Plan | None, int]] = []

    def added(name: str, call: Callable[..., Any], plan: Plan | None = None) -> int:
        peak = measured_run(example, call, device).peak_bytes
        calls.append((name, call, plan, peak))
        return peak

    plain = added("none", example.model)
    checkpointed = added(
        "checkpoint_sequential 5", lambda x: checkpoint_sequential(example.model, 5, x, use_reentrant=False)
    )
    grids, shares = _listed(options.grids), [int(share) for share in _listed(options.shares)]
    for name, plan in _plans(example, grids, plain, checkpointed, shares):
        assert plan.planned is not None
        added(name, compile_program(example.model, plan.planned.capture, plan.program, describe=plan.__str__), plan)
    with preserved(example.model):
        seconds = _interleaved(example, [call for _, call, _, _ in calls], options.repeats, device)
    for (name, _, plan, peak), (forward, backward) in zip(calls, seconds, strict=True):
        report.add(
            *(table, str(size), name, f"{forward:.3g}", f"{backward:.3g}", f"{forward + backward:.3g}"),
            f"{(forward + backward) / sum(seconds[0]):.2f}",
            _mib(peak),
            "" if plan is None else _mib(plan.predicted.peak_bytes),
            "" if plan is None else f"{100 * plan.predicted.overhead:.1f}",
        )


def _checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint_sequential(model, 5, x, use_reentrant=False)
    return result


def _listed(text: str) -> list[str]:
    return text.split(",") if text else []


def _plans(
    example: Example, grids: list[str], plain: int, checkpointed: int, shares: list[int]
) -> Iterator[tuple[str, Plan]]:
    """Fixed grids, then memfit at several budgets."""
    model, args, kwargs = example.model, tuple(example.args), dict(example.kwargs)
    request = Request(budget="auto", loss_fn=example.loss_fn, levers="all", label=example.label, prove=False)
    step = capture_and_profile(model, args, kwargs, request)
    for grid in grids:
        fixed = replace(request, strategy=f"tile:{grid}")
        yield f"tile:{grid}", plan_profiled(model, args, kwargs, step, fixed, _NO_BUDGET)
    budgets = {"none's peak": plain, "checkpoint's peak": checkpointed}
    budgets |= {f"{share} % of the baseline peak": plain * share // 100 for share in shares}
    for name, budget in budgets.items():
        try:
            yield f"memfit, {name}", plan_profiled(model, args, kwargs, step, replace(request, prove=True), budget)
        except BudgetError as error:
            print(f"{name}: {error}")


def _interleaved(
    example: Example, calls: list[Callable[..., Any]], repeats: int, device: torch.device
) -> list[tuple[float, float]]:
    """Median seconds of forward and backward passes, in turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in calls]
    assert example.loss_fn is not None
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            example.model.zero_grad()
            begin = _now(device)
            loss = example.loss_fn(call(*example.args, **example.kwargs))
            between = _now(device)
            loss.backward()
            taken.append((between - begin, _now(device) - between))
            del loss
    return [(statistics.median(f for f, _ in taken), statistics.median(b for _, b in taken)) for taken in times]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


if __name__ == "__main__":
    main()
