"""Plans a training step within a budget, proves it by one run, and prints it as pseudo-code.

The step is captured, its ops are timed on the device, the plan is made, run once and corrected if the machine
takes more than predicted. --save writes it as JSON for memfit.Plan.load and for verify --plan.
"""

from __future__ import annotations

import argparse

from memfit.cli.options import add_budget, add_levers, add_model, add_output, add_strategy, add_tiers, build_example
from memfit.cli.output import check_output, emit
from memfit.cli.planned import plan_example

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_model(parser)
    add_budget(parser)
    add_strategy(parser)
    add_tiers(parser)
    add_levers(parser)
    parser.add_argument("--save", metavar="PATH", help="write the plan to a file")
    parser.add_argument("--no-prove", action="store_true", help="do not run the plan; everything is predicted")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Plans."""
    from memfit.report.progress import progress_bars

    check_output(args)
    example = build_example(args, args.batch)
    with progress_bars() as progress:
        plan = plan_example(example, args, prove=not args.no_prove, progress=progress)
    if args.save is not None:
        plan.save(args.save)
    emit(plan, args)
    return 0 if plan.fits else 1
