"""Trains VGG-16's trunk on whole photographs, upscaled until the baseline step would need eight times the budget.

The weights are random. The inputs are scikit-learn's two sample photographs, one in each step, and the model learns to
tell them apart. All runs take a few steps with SGD. The first two runs are at full resolution, or at `--scale`: one
with the baseline step, and one with a planned step within the budget. Their losses must be equal up to rounding. The
third run has a planned step within the same budget, at the first scale at which the baseline step is predicted to need
`--times` times the budget. The baseline step is not run at this scale. The demo needs scikit-learn (pip install
'memfit[demo]'), and takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from memfit.cli.options import whole_number
from memfit.units import format_bytes, format_percent, format_seconds, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from memfit.compiler.plan import CompiledPlan
    from memfit.compiler.request import Progress

__all__ = ["prepare_parser", "run"]

_TOLERANCE = 1e-4
"""Largest relative difference that counts as rounding, for the losses of a few steps in float32."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit demo tile`; all are optional."""
    parser.add_argument("--tile-budget", default="300MiB", metavar="BYTES", help="with `tile` (default: 300MiB)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="with `tile`: of the photographs to start from (default: 1)",
    )
    parser.add_argument(
        "--times", type=whole_number, default=8, metavar="N", help="with `tile`: baseline peak over budget (default: 8)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Losses and measurements of one run.

    Attributes:
        losses: loss of each step.
        step_seconds: median wall-clock time of the steps from the third on.
        peak_bytes: measured peak of the second step.
    """

    losses: list[float]
    step_seconds: float
    peak_bytes: int


def run(args: argparse.Namespace) -> int:
    """Trains twice at full resolution and once on the upscaled photographs, and prints tables of losses and costs.

    Returns:
        0 if the losses at full resolution are equal up to rounding, and the measured peaks of both planned steps are
        within the budget; else 1.

    Raises:
        MemfitError: errors of `memfit.fit`.
        SpecError: if the budget is invalid, or scikit-learn is missing.
    """
    from memfit.api import fit, plan_of
    from memfit.report.progress import progress_bars
    from memfit.zoo import whole_photographs

    budget = parse_bytes(args.tile_budget)
    photos, labels = whole_photographs(multiple=32, scale=args.scale)
    scale = _scale(labels, args.scale, budget, args.times)
    large, _ = whole_photographs(multiple=32, scale=scale)
    print(f"VGG-16's trunk on two photographs, {_size(photos)} and {_size(large)} pixels")
    runs: list[tuple[str, CompiledPlan, _Run, _Run | None]] = []
    with progress_bars() as progress:
        for name, images in (("full resolution", photos), ("upscaled", large)):
            model = _trunk(images)
            plain = copy.deepcopy(model) if images is photos else None
            fit(model, (images[:1],), budget=budget, loss_fn=_loss_of(labels[:1]), levers="all", progress=progress)
            planned = _train(model, images, labels, args.steps, f"train {name}", progress)
            alone = (
                None if plain is None else _train(plain, images, labels, args.steps, f"train {name} plain", progress)
            )
            runs.append((name, plan_of(model), planned, alone))
    _print_table(runs, photos, large)
    *_, planned, alone = runs[0]
    assert alone is not None
    equal = all(abs(a - b) <= _TOLERANCE * abs(a) for a, b in zip(alone.losses, planned.losses, strict=True))
    within = all(of.peak_bytes <= budget for _, _, of, _ in runs)
    last = runs[1][1].predicted
    print(
        f"{'Fits' if within else 'Does not fit'}: the baseline step would need "
        f"{format_bytes(last.plain_peak_bytes)} predicted, "
        f"{last.plain_peak_bytes / budget:.1f} times the budget {format_bytes(budget)}; planned takes "
        f"{format_bytes(runs[1][2].peak_bytes)} measured, {format_percent(last.overhead)} step time predicted; "
        f"losses at full resolution {'equal up to rounding' if equal else 'DIFFER'}."
    )
    if not equal:
        print("memfit: the losses differ; please report this with the output of: memfit verify", file=sys.stderr)
    return 0 if equal and within else 1


def _trunk(images: Tensor) -> nn.Module:
    import torch

    from memfit.zoo.vgg16_trunk import vgg16_trunk

    torch.manual_seed(0)
    return vgg16_trunk(channels=3, height=images.shape[2], width=images.shape[3], classes=2)


def _loss_of(target: Tensor) -> Callable[[Tensor], Tensor]:
    from functools import partial

    from memfit.zoo.example import mean_squared_error

    return partial(mean_squared_error, target=target)


def _scale(labels: Tensor, first: float, budget: int, times: int) -> float:
    """The first scale at which the baseline step is predicted to need a multiple of the budget.

    Args:
        labels: one-hot labels of the photographs, float32 [2, 2].
        first: the first scale to try; each next scale is larger by 0.25.
        budget: in bytes.
        times: ratio of the baseline step's peak to the budget.
    """
    from memfit.tools.estimate import estimate
    from memfit.zoo import whole_photographs

    scale = first
    while True:
        images, _ = whole_photographs(multiple=32, scale=scale)
        plain = estimate(_trunk(images), (images[:1],), loss_fn=_loss_of(labels[:1]))
        if plain.peak >= times * budget:
            return scale
        scale += 0.25


def _train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, stage: str, progress: Progress) -> _Run:
    """Runs steps on the photographs in turns, one photograph in each step.

    The first step warms up. The second step is measured for its peak, later steps for their time.

    Args:
        model: plain or fitted.
        images: float32 [2, 3, height, width].
        labels: one-hot labels of the photographs, float32 [2, 2].
        steps: number of steps, at least 3.
        stage: name of the run, for `progress`.
        progress: called with the progress.
    """
    import torch

    from memfit.tools.training_loop import resident_bytes, step_peak, training_step

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    device = torch.device("cpu")
    losses: list[float] = []
    seconds: list[float] = []
    peak = 0
    for number in range(steps):
        progress(stage, number, steps)
        here = slice(number % len(images), number % len(images) + 1)
        x = images[here].contiguous()
        step = training_step(model, model, (x,), {}, loss_fn=_loss_of(labels[here]), optimizer=optimizer)

        def remembered(step: Callable[[], torch.Tensor | None] = step) -> None:
            loss = step()
            assert loss is not None
            losses.append(float(loss))

        if number == 1:

            def resident(x: Tensor = x) -> int:
                return resident_bytes(model, (x,), {}, optimizer, device)

            peak = step_peak(remembered, device, resident, warmup=0)
            continue
        begin = time.perf_counter()
        remembered()
        if number > 1:
            seconds.append(time.perf_counter() - begin)
    progress(stage, steps, steps)
    return _Run(losses=losses, step_seconds=median(seconds), peak_bytes=peak)


def _print_table(runs: list[tuple[str, CompiledPlan, _Run, _Run | None]], photos: Tensor, large: Tensor) -> None:
    from rich.console import Console

    from memfit.report.table import Sheet, show

    costs: list[tuple[str, ...]] = []
    losses: list[tuple[str, ...]] = []
    for (_, plan, planned, plain), images in zip(runs, (photos, large), strict=True):
        p = plan.predicted
        kinds = (
            ("baseline", p.plain_peak_bytes, p.step_seconds / (1 + p.overhead), plain),
            ("planned", p.peak_bytes, p.step_seconds, planned),
        )
        for kind, peak_bytes, seconds, run in kinds:
            peak, step = ("not run",) * 2
            if run is not None:
                peak, step = format_bytes(run.peak_bytes), format_seconds(run.step_seconds)
            costs.append((_size(images), kind, format_bytes(peak_bytes), peak, format_seconds(seconds), step))
            if run is not None:
                losses.append((_size(images), kind, *(f"{loss:.6f}" for loss in run.losses)))
    console = Console(file=sys.stdout)
    headers = ("pixels", "", "peak\npredicted", "peak\nmeasured", "step\npredicted", "step\nmeasured")
    show(Sheet(title="cost", headers=headers, rows=tuple(costs), left=frozenset({0, 1})), console)
    steps = tuple(f"step {number + 1}" for number in range(len(losses[0]) - 2))
    show(Sheet(title="loss", headers=("pixels", "", *steps), rows=tuple(losses), left=frozenset({0, 1})), console)


def _size(images: Tensor) -> str:
    return f"{images.shape[2]}×{images.shape[3]}"
