"""Plans a training step within a budget, proves the plan by a run, and prints it as pseudo-code.

memfit captures the step, times its ops on the device and makes a plan. Then it runs the plan and compares the results
with those of the baseline step. If the measured peak exceeds the budget, the plan is corrected and proved once more.
--save writes the plan as JSON, for memfit.Plan.load and for verify --plan.
"""

from __future__ import annotations

import argparse

from memfit.cli.options import add_budget, add_levers, add_model, add_output, add_strategy, add_tiers, build_example
from memfit.cli.output import check_output, emit
from memfit.cli.planned import plan_example

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit plan`."""
    add_model(parser)
    add_budget(parser)
    add_strategy(parser)
    add_tiers(parser)
    add_levers(parser)
    parser.add_argument("--save", metavar="PATH", help="write the plan to a file")
    parser.add_argument("--no-prove", action="store_true", help="do not run the plan; everything is predicted")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Plans the step, saves the plan if asked to, and writes it.

    Returns:
        0 if the plan fits, else 1.

    Raises:
        BudgetError: if no plan fits.
        MemfitError: other errors of `memfit.plan`.
        SpecError: if an option is invalid, or the results cannot be written.
        OSError: if the plan cannot be saved.
    """
    from memfit.report.progress import progress_bars

    check_output(args)
    example = build_example(args, args.batch)
    with progress_bars() as progress:
        plan = plan_example(example, args, prove=not args.no_prove, progress=progress)
    if args.save is not None:
        plan.save(args.save)
    emit(plan, args)
    return 0 if plan.fits else 1
