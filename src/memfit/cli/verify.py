"""Runs plain and planned steps from the same state and compares them bit by bit, tiled steps up to rounding.

After each step, it compares the loss, every gradient, every buffer, every updated parameter and the random state. It
also compares the measured peak with the budget, and the executed recomputations and swaps with those of the plan. The
exit code is 0 only if all agree.
"""

from __future__ import annotations

import argparse

from memfit.cli.options import (
    add_budget,
    add_levers,
    add_model,
    add_output,
    add_strategy,
    add_tiers,
    build_example,
    optimizer_factory,
    whole_number,
)
from memfit.cli.output import check_output, emit
from memfit.cli.planned import plan_example
from memfit.errors import SpecError

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit verify`."""
    add_model(parser)
    add_budget(parser, required=False)
    add_strategy(parser)
    add_tiers(parser)
    add_levers(parser)
    parser.add_argument("--plan", metavar="PATH", help="verify this plan file instead of planning for --budget")
    parser.add_argument(
        "--steps", type=whole_number, default=1, metavar="N", help="steps to compare after the first one (default: 1)"
    )
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Verifies a plan from a file, or a new plan for a budget, and writes the result.

    Returns:
        0 if the verification passed, else 1.

    Raises:
        MemfitError: errors of planning, of the plan file or of running the plan.
        SpecError: if not exactly one of `--budget` and `--plan` is given, or the results cannot be written.
    """
    from memfit.compiler.plan import CompiledPlan
    from memfit.report.progress import progress_bars
    from memfit.tools.verify import verify

    check_output(args)
    if (args.plan is None) == (args.budget is None):
        raise SpecError(f"verify takes either --budget or --plan (budget: {args.budget!r}, plan: {args.plan!r})")
    plan = None if args.plan is None else CompiledPlan.load(args.plan)
    example = build_example(args, args.batch)
    with progress_bars() as progress:
        optimizer = None
        if plan is None:
            plan = plan_example(example, args, progress=progress)
        elif (factory := optimizer_factory(args.optimizer)) is not None:
            optimizer = factory(example.model.parameters())
        result = verify(
            example.model,
            example.args,
            example.kwargs,
            plan,
            steps=args.steps,
            loss_fn=example.loss_fn,
            optimizer=optimizer,
            progress=progress,
        )
    emit(result, args)
    return 0 if result.passed else 1
