"""Trains ResNet-50 on two photographs, plain and at 40 % of the baseline step's peak, and compares the losses.

The weights are random. The inputs are crops of scikit-learn's two sample photographs, and the model learns to tell the
photographs apart. Both runs take a few steps with SGD and momentum. They start from the same weights and see the same
crops, so their losses must be equal bit by bit. The demo needs torchvision and scikit-learn (pip install
'memfit[demo]'), and takes a few minutes on two cores. `memfit demo tile` is another demo: it trains VGG-16's trunk on
whole photographs, in tiles.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from memfit.cli import demo_tile
from memfit.cli.options import build_example, whole_number
from memfit.errors import SpecError
from memfit.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from memfit.compiler.plan import CompiledPlan

__all__ = ["prepare_parser", "run"]

_PEAK_STEP = 1
"""Index of the step whose peak is measured: the second step, because the first step makes the optimizer's state."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit demo`, also those of `memfit demo tile`; all are optional."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("photographs", "tile"),
        default="photographs",
        help="which demo (default: the first)",
    )
    demo_tile.prepare_parser(parser)
    parser.add_argument("--model", default="torchvision:resnet50?num_classes=2", metavar="MODEL", help="what to train")
    parser.add_argument("--batch", type=whole_number, default=20, metavar="N", help="crops in a batch (default: 20)")
    parser.add_argument("--size", type=whole_number, default=224, metavar="N", help="pixels of a crop (default: 224)")
    parser.add_argument("--steps", type=whole_number, default=4, metavar="N", help="at least 3 (default: 4)")
    parser.add_argument(
        "--percent", type=whole_number, default=40, metavar="N", help="budget in %% of the baseline peak (default: 40)"
    )
    parser.set_defaults(dtype="float32", device="cpu")


@dataclass(slots=True)
class _Run:
    """A model in training, with its losses and measurements.

    Attributes:
        model: plain or fitted.
        optimizer: of the model's parameters.
        losses: loss of each step.
        seconds: wall-clock time of each step from the third on.
        peak_bytes: measured peak of the second step; 0 before that step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def train(self, x: Tensor, y: Tensor) -> None:
        """Runs one step.

        The first step warms up. The second step is measured for its peak, later steps for their time.

        Args:
            x: crops, float32 [batch, 3, size, size].
            y: index of the photograph of each crop, int64 [batch].
        """
        from memfit.capture.training_step import device_of
        from memfit.tools.training_loop import resident_bytes, step_peak, training_step

        device = device_of(self.model)
        step = training_step(self.model, self.model, (x,), {}, loss_fn=_loss_of(y), optimizer=self.optimizer)

        def remembered() -> None:
            loss = step()
            assert loss is not None
            self.losses.append(loss)

        if len(self.losses) == _PEAK_STEP:
            self.peak_bytes = step_peak(
                remembered, device, lambda: resident_bytes(self.model, (x,), {}, self.optimizer, device), warmup=0
            )
            return
        begin = time.perf_counter()
        remembered()
        if len(self.losses) > _PEAK_STEP:
            self.seconds.append(time.perf_counter() - begin)


def run(args: argparse.Namespace) -> int:
    """Trains the model with the baseline step and with a planned step, and prints tables of losses and costs.

    Returns:
        0 if all losses are equal and the measured peak is within the budget, else 1. With `tile`, the exit code of
        `memfit.cli.demo_tile.run`.

    Raises:
        MemfitError: errors of `memfit.fit`.
        SpecError: if there are fewer than three steps, or the model cannot be built.
    """
    if args.steps < 3:
        raise SpecError(f"the demo needs a step to warm up, one to measure and one to time (steps: {args.steps})")
    if args.what == "tile":
        return demo_tile.run(args)
    import torch

    from memfit import zoo
    from memfit.api import fit, plan_of
    from memfit.report.progress import progress_bars

    args.shape = (3, args.size, args.size)
    data = list(islice(zoo.photo_crops(batch=args.batch, size=args.size), args.steps))
    model = build_example(args, args.batch).model
    plain, planned = _start(model), _start(copy.deepcopy(model))
    crops = f"{args.batch}×3×{args.size}×{args.size}"
    print(f"{args.model}, random weights, {args.steps} steps on crops {crops} of two photographs")

    with progress_bars() as progress:
        for number in range(_PEAK_STEP + 1):
            progress("train plain", number, args.steps)
            plain.train(*data[number])
        budget = plain.peak_bytes * args.percent // 100
        x, y = data[0]
        fit(
            planned.model,
            (x,),
            budget=budget,
            loss_fn=_loss_of(y),
            optimizer=planned.optimizer,
            progress=progress,
        )
        for number in range(args.steps):
            progress("train within the budget", number, args.steps)
            if number > _PEAK_STEP:
                plain.train(*data[number])
            planned.train(*data[number])
    plan = plan_of(planned.model)
    equal = all(torch.equal(a, b) for a, b in zip(plain.losses, planned.losses, strict=True))
    _print_tables(plain, planned, plan)
    within = planned.peak_bytes <= budget
    slower = median(planned.seconds) / median(plain.seconds) - 1
    print(
        f"{'Fits' if within else 'Does not fit'}: {format_bytes(plan.predicted.peak_bytes)} predicted, "
        f"{format_bytes(planned.peak_bytes)} measured, of {format_bytes(budget)} "
        f"({args.percent} % of the baseline peak); "
        f"{format_percent(plan.predicted.overhead)} step time predicted, {format_percent(slower)} measured; "
        f"losses {'bitwise equal' if equal else 'DIFFER'}."
    )
    if not equal:
        print("memfit: the losses differ; please report this with the output of: memfit verify", file=sys.stderr)
    return 0 if equal and within else 1


def _start(model: nn.Module) -> _Run:
    import torch

    return _Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def _loss_of(target: Tensor) -> Callable[[Tensor], Tensor]:
    from functools import partial

    from memfit.zoo.example import classifier_loss

    return partial(classifier_loss, target=target)


def _print_tables(plain: _Run, planned: _Run, plan: CompiledPlan) -> None:
    from rich.console import Console

    from memfit.report.table import Sheet, show

    losses = tuple(
        (str(number), f"{a.item():.9f}", f"{b.item():.9f}", "equal" if bool((a == b).all()) else "DIFFERENT")
        for number, (a, b) in enumerate(zip(plain.losses, planned.losses, strict=True), start=1)
    )
    predicted = plan.predicted
    costs = (
        ("peak", "predicted", format_bytes(predicted.plain_peak_bytes), format_bytes(predicted.peak_bytes)),
        ("", "measured", format_bytes(plain.peak_bytes), format_bytes(planned.peak_bytes)),
        (
            *("step", "predicted", format_seconds(predicted.step_seconds / (1 + predicted.overhead))),
            format_seconds(predicted.step_seconds),
        ),
        ("", "measured", format_seconds(median(plain.seconds)), format_seconds(median(planned.seconds))),
    )
    console = Console(file=sys.stdout)
    show(Sheet(title="loss", headers=("step", "baseline", "planned", ""), rows=losses), console)
    show(Sheet(title="cost", headers=("", "", "baseline", "planned"), rows=costs, left=frozenset({0, 1})), console)
