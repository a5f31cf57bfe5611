"""Finds the largest batch that trains within a budget.

The step is captured at a few batch sizes and predicted at the others. A run of the planned step confirms the result.
The table shows some batch sizes up to the largest one. For each of them it has the baseline step's peak, the
approximate least peak of a plan, and the extra time of a plan within the budget, all predicted.

With `--effective-batch` the question is another one: into how many micro-batches to divide a batch.
"""

from __future__ import annotations

import argparse
from functools import lru_cache

from memfit.cli.options import (
    add_budget,
    add_model,
    add_output,
    add_strategy,
    add_tiers,
    build_example,
    optimizer_factory,
    whole_number,
)
from memfit.cli.output import check_output, emit

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit max-batch`."""
    add_model(parser, batch=False)
    add_budget(parser, plain=False)
    add_strategy(parser)
    add_tiers(parser)
    parser.add_argument("--start", type=whole_number, default=1, metavar="N", help="smallest batch to try (default: 1)")
    parser.add_argument("--limit", type=whole_number, default=65536, metavar="N", help="largest one (default: 65536)")
    parser.add_argument("--no-prove", action="store_true", help="do not run the plan; everything is predicted")
    parser.add_argument(
        "--effective-batch",
        type=whole_number,
        metavar="N",
        help="samples for one step of the optimizer: tells the micro-batch and the accumulation steps that take the "
        "least time, by prediction",
    )
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Searches for the largest batch and writes the result.

    Returns:
        0.

    Raises:
        BudgetError: if not even the smallest batch fits.
        MemfitError: other errors of `memfit.max_batch`.
        SpecError: if an option is invalid, or the results cannot be written.
    """
    from dataclasses import replace

    from memfit.errors import SpecError
    from memfit.report.progress import progress_bars
    from memfit.tools.effective_batch import EffectiveBatch, effective_batch
    from memfit.tools.max_batch import BatchSize, max_batch

    check_output(args)
    result: BatchSize | EffectiveBatch
    factory = optimizer_factory(args.optimizer)
    example = build_example(args, max(2, args.start))
    at = lru_cache(maxsize=1)(lambda batch: build_example(args, batch))
    with progress_bars() as progress:
        if args.effective_batch is not None:
            if args.strategy != "auto":
                raise SpecError(f"--effective-batch plans with strategy 'auto' (--strategy: {args.strategy})")
            result = effective_batch(
                example.model,
                lambda batch: (at(batch).args, at(batch).kwargs),
                samples=args.effective_batch,
                budget=args.budget,
                make_loss=lambda batch: at(batch).loss_fn,
                optimizer=None if factory is None else factory(example.model.parameters()),
                tiers=args.tiers,
                progress=progress,
            )
        else:
            result = max_batch(
                example.model,
                lambda batch: (at(batch).args, at(batch).kwargs),
                budget=args.budget,
                make_loss=lambda batch: at(batch).loss_fn,
                optimizer=None if factory is None else factory(example.model.parameters()),
                strategy=args.strategy,
                tiers=args.tiers,
                start=args.start,
                limit=args.limit,
                prove=not args.no_prove,
                progress=progress,
            )
    emit(replace(result, label=args.model), args)
    return 0
