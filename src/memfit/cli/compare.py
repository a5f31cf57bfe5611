"""Runs several strategies at several batch sizes, sample sizes and budgets, and prints one table.

A row shows the peak and the time of the baseline step and of the planned step, predicted and measured. It also shows
the time of recomputation and the numbers of saved and recomputed activations. All planned steps of one batch and sample
size are timed in turns with the baseline step, in one process. If no plan of a strategy fits a budget, the row says so.
In this command, a budget in percent refers to the baseline step's predicted peak. `memfit compare pipeline` compares
pipelines and prints another table.
"""

from __future__ import annotations

import argparse

from memfit.cli import compare_pipeline
from memfit.cli.options import (
    add_levers,
    add_model,
    add_output,
    add_tiers,
    build_example,
    example_of_size,
    optimizer_factory,
    whole_numbers,
    words,
)
from memfit.cli.output import check_output, emit
from memfit.errors import SpecError

__all__ = ["prepare_parser", "run"]

_STRATEGIES = "none,every-block,sqrt,mu-two,auto"
_BUDGETS = "80%,60%,40%"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit compare`, also those of `memfit compare pipeline`."""
    add_model(parser, batch=False)
    compare_pipeline.prepare_parser(parser)
    parser.add_argument("--batch", type=whole_numbers, default=(8,), metavar="N,N,...", help="batch sizes (default: 8)")
    parser.add_argument(
        "--size", type=whole_numbers, metavar="N,N,...", help="heights and widths of images, or tokens of sequences"
    )
    parser.add_argument(
        "--strategy", type=words, default=words(_STRATEGIES), metavar="NAME,...", help=f"(default: {_STRATEGIES})"
    )
    parser.add_argument(
        "--budget",
        type=words,
        default=words(_BUDGETS),
        metavar="BYTES,...",
        help="bytes, 8GiB, or 40%% of the baseline step's predicted peak (default: "
        + _BUDGETS.replace("%", "%%")
        + ")",
    )
    add_tiers(parser)
    add_levers(parser)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each step (default: 3)")
    parser.add_argument("--no-measure", action="store_true", help="run nothing but single ops; everything is predicted")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Compares the strategies and writes the table.

    Returns:
        0 if at least one row fits, else 1; always 0 for `compare pipeline`.

    Raises:
        MemfitError: errors of `memfit.compare`.
        SpecError: if two models are given, or the table cannot be written.
    """
    if args.model == "pipeline":
        return compare_pipeline.run(args)
    if args.of is not None:
        raise SpecError(f"compare takes one model, or `pipeline` and a model (given: {args.model!r} and {args.of!r})")
    from memfit.report.progress import progress_bars
    from memfit.tools.compare import compare

    check_output(args)
    factory = optimizer_factory(args.optimizer)
    with progress_bars() as progress:
        result = compare(
            lambda batch, *size: example_of_size(args, batch, *size) if size else build_example(args, batch),
            strategies=args.strategy,
            batches=args.batch,
            sizes=args.size or (None,),
            budgets=args.budget,
            optimizer=factory,
            levers=args.levers,
            tiers=args.tiers,
            measure=not args.no_measure,
            repeats=args.repeats,
            progress=progress,
        )
    emit(result, args)
    return 0 if any(row.fits for row in result.rows) else 1
