"""Finds the largest image or sequence that trains within a budget.

The size of an image is its height and width in pixels, for models that take C×H×W samples. The size of a sequence is
its number of tokens. The step is captured and its least peak is predicted at a few sizes. A run of the planned step
confirms the result.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from memfit.cli.options import (
    add_budget,
    add_levers,
    add_model,
    add_output,
    example_of_size,
    optimizer_factory,
    whole_number,
)
from memfit.cli.output import check_output, emit

if TYPE_CHECKING:
    from memfit.tools.max_size import Made

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit max-size`."""
    add_model(parser)
    add_budget(parser, plain=False)
    add_levers(parser)
    parser.add_argument("--start", type=whole_number, default=64, metavar="N", help="smallest size (default: 64)")
    parser.add_argument("--step", type=whole_number, default=32, metavar="N", help="between sizes (default: 32)")
    parser.add_argument(
        "--limit", type=whole_number, default=1 << 16, metavar="N", help="largest size (default: 65536)"
    )
    parser.add_argument("--no-prove", action="store_true", help="do not run the plan; everything is predicted")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Searches for the largest size and writes the result.

    Returns:
        0.

    Raises:
        BudgetError: if not even the smallest size fits.
        MemfitError: other errors of `memfit.max_size`.
        SpecError: if an option is invalid, or the results cannot be written.
    """
    from memfit.report.progress import progress_bars
    from memfit.tools.max_size import max_size

    check_output(args)

    def make(size: int) -> Made:
        example = example_of_size(args, args.batch, size)
        return example.model, tuple(example.args), dict(example.kwargs), example.loss_fn

    with progress_bars() as progress:
        result = max_size(
            make,
            budget=args.budget,
            optimizer=optimizer_factory(args.optimizer),
            levers=args.levers,
            start=args.start,
            step=args.step,
            limit=args.limit,
            prove=not args.no_prove,
            label=args.model,
            progress=progress,
        )
    emit(result, args)
    return 0
