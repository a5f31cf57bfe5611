"""How far `memfit.estimate` is from the measured peak of the baseline step, case by case.

python -m benchmarks.estimate.main --only "convolutions,fuzz 0-9,zoo:unet@2"
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import memfit
from benchmarks.estimate.cases import CASES, Step
from benchmarks.fuzz.model import assemble
from benchmarks.fuzz.modes import MODES
from benchmarks.fuzz.recipe import choose
from benchmarks.report import Report
from benchmarks.subject import case_of
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step, device_of
from memfit.errors import MemfitError
from memfit.profiling.cost_cache import CostCache
from memfit.profiling.profiler import profile_ops
from memfit.sim.simulator import simulate_baseline
from memfit.tools.training_loop import resident_bytes, step_peak, training_step
from memfit.zoo import build

COLUMNS = ("step", "measured MiB", "estimated MiB", "ratio", "profiled ratio", "at")

ZOO = ("zoo:unet@2@3x64x64", "zoo:vgg16-trunk@2@3x64x64", "zoo:resnet-deep@4", "zoo:keras-cnn@16", "zoo:gpt@4",
       "zoo:llama@4", "zoo:mlp@64", "zoo:lstm-classifier@16", "torchvision:resnet18@4@3x96x96",
       "torchvision:mobilenet_v3_small@8@3x96x96",
       "hf:gpt2?n_layer=2&n_embd=128&n_head=4&vocab_size=2000@4@128")  # fmt: skip
"""Models by spec, batch and shape."""

FUZZ = "fuzz 0-11"


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    warnings.filterwarnings("ignore")
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=torch.device("cpu"))
    table = report.table("Estimated and measured", COLUMNS)
    for name, make in _named(options.only.split(",") if options.only else [*CASES, *ZOO, FUZZ]):
        report.add(table, name, *_row(make, profiled=not options.quick))
        torch._dynamo.reset()
        gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimate.main", description=__doc__)
    parser.add_argument("--only", default="", help="names of cases, `fuzz 0-9`, or SPEC@BATCH@SHAPE, with commas")
    parser.add_argument("--quick", action="store_true", help="leave out the profiled step")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    return parser.parse_args(arguments)


def _named(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], Step]]]:
    for name in names:
        if name.startswith("fuzz "):
            first, _, last = name.removeprefix("fuzz ").partition("-")
            for seed in range(int(first), int(last or first) + 1):
                yield f"fuzz {seed}", functools.partial(_of_fuzz, seed)
        elif ":" in name:
            yield name.replace("|", ""), functools.partial(_of_zoo, name)
        else:
            yield name, CASES[name]


def _of_fuzz(seed: int) -> Step:
    case = assemble(choose(seed, MODES["bitwise"]))
    args, kwargs = case.inputs(0)
    return Step(model=case.model, args=args, kwargs=kwargs, loss_fn=case.loss, optimizer=case.optimizer)


def _of_zoo(text: str) -> Step:
    case = case_of(text)
    made = build(case.spec, batch=case.batch, shape=case.shape)
    return Step(model=made.model, args=made.args, kwargs=made.kwargs, loss_fn=made.loss_fn)


def _row(make: Callable[[], Step], *, profiled: bool) -> tuple[str, ...]:
    torch.manual_seed(0)
    step = make()
    with _around(step):
        try:
            measured = measured_peak(step)
        except Exception as error:
            return "", "", f"the baseline step fails, {type(error).__name__}", "", ""
        try:
            found = memfit.estimate(step.model, step.args, step.kwargs, loss_fn=step.loss_fn, optimizer=step.optimizer)
            of_ops = f"{_profiled(step) / measured:.3f}" if profiled else ""
        except MemfitError as error:
            return "", "", f"{type(error).__name__}: {str(error).splitlines()[0][:90]}", "", ""
    mib = 2**20
    return (
        f"{measured / mib:.2f}", f"{found.peak / mib:.2f}", f"{found.peak / measured:.3f}", of_ops, found.peak_at
    )  # fmt: skip


def measured_peak(step: Step) -> int:
    """The peak bytes of the second of two baseline steps."""
    optimizer = step.optimizer
    run = training_step(
        *(step.model, step.model, step.args, step.kwargs),
        loss_fn=step.loss_fn,
        optimizer=optimizer,
        hold_outputs=False,
    )
    return step_peak(
        run, torch.device("cpu"),
        lambda: resident_bytes(step.model, step.args, step.kwargs, optimizer, torch.device("cpu")),
    )  # fmt: skip


def _profiled(step: Step) -> int:
    device = device_of(step.model)
    capture = capture_step(
        *(step.model, step.args, step.kwargs),
        loss_fn=step.loss_fn,
        optimizer=step.optimizer,
        options=CaptureOptions(separate=lambda _: True),
    )
    return simulate_baseline(profile_ops(capture, device, CostCache())).peak_bytes


@contextlib.contextmanager
def _around(step: Step) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if step.autocast is not None:
            stack.enter_context(torch.autocast("cpu", step.autocast))
        yield


if __name__ == "__main__":
    main()
