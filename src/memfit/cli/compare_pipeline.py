"""`memfit compare pipeline [MODEL]`: compares memfit, torchgpipe, and PyTorch's engine with equal stages.

The engine gets the same number of layers in each stage. Every system trains on the same batch, and all stages run in
this process. torchgpipe must be installed (pip install 'memfit[bench]'), unless `--systems` leaves it out.
"""

from __future__ import annotations

import argparse
from itertools import product

from memfit.cli.options import build_example, whole_numbers, words
from memfit.cli.output import check_output, emit
from memfit.errors import SpecError

__all__ = ["prepare_parser", "run"]

_MODEL = "zoo:seed-gpt2?dropout=0.0"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit compare` that apply to pipelines only."""
    parser.add_argument("of", nargs="?", metavar="MODEL", help=f"after `pipeline`: the model (default: {_MODEL})")
    for name, default in (("--stages", "1,2,4"), ("--microbatches", "1,2,4,8,16,32,64")):
        parser.add_argument(
            name, type=whole_numbers, default=default, metavar="N,...", help=f"with `pipeline` (default: {default})"
        )
    parser.add_argument(
        "--checkpoint", type=words, default=("off", "on"), metavar="off,on", help="with `pipeline` (default: off,on)"
    )
    parser.add_argument("--systems", type=words, metavar="NAME,...", help="with `pipeline` (default: all three)")


def run(args: argparse.Namespace) -> int:
    """Compares the systems for each number of stages, number of micro-batches and checkpoint mode.

    A combination with more micro-batches than samples is left out.

    Returns:
        0.

    Raises:
        MemfitError: if a system cannot run the model.
        SpecError: if an option is invalid, or torchgpipe is compared and not installed.
    """
    from memfit.tools.compare_pipelines import SYSTEMS, Cell, PipelineComparison, compare_cell

    check_output(args)
    systems = args.systems or SYSTEMS
    if not set(systems) <= set(SYSTEMS):
        raise SpecError(f"unknown system; there are {', '.join(SYSTEMS)} (systems: {','.join(systems)})")
    if not set(args.checkpoint) <= {"off", "on"}:
        raise SpecError(f"--checkpoint takes off, on or both (checkpoint: {','.join(args.checkpoint)})")
    args.model = args.of or _MODEL
    (batch, *more) = args.batch
    if more:
        raise SpecError("pipelines are compared at one batch size; give --batch one number")
    example = build_example(args, batch)

    def make() -> tuple[object, ...]:
        made = build_example(args, batch)
        loss_fn, target = made.loss_and_target()
        return made.model, made.args[0], target, loss_fn

    rows = []
    for num_stages, num_microbatches, checkpoint in product(args.stages, args.microbatches, args.checkpoint):
        if num_microbatches <= batch:
            cell = Cell(num_stages=num_stages, num_microbatches=num_microbatches, checkpointed=checkpoint == "on")
            rows += compare_cell(make, cell, systems=systems, repeats=args.repeats)
    emit(PipelineComparison(label=example.label, rows=tuple(rows)), args)
    return 0
