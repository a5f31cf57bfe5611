"""Plans a pipeline: the cuts of the model, the schedule of the devices, and the plan of each stage.

The model is traced on one micro-batch, and its ops are timed on this machine. The part of each device then runs alone,
so that its peak is measured. This command runs all stages in one process; to train, start one process for each device
(docs/guide.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from memfit.cli.options import add_levers, add_model, add_tiers, build_example, optimizer_factory, whole_number, words
from memfit.cli.output import write_text
from memfit.errors import SpecError

__all__ = ["prepare_parser", "run"]


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `memfit pipeline`."""
    add_model(parser)
    parser.add_argument("--stages", type=whole_number, required=True, metavar="K", help="devices, a stage each")
    parser.add_argument("--microbatches", type=whole_number, required=True, metavar="M", help="parts of the batch")
    parser.add_argument(
        "--budget",
        type=words,
        metavar="BYTES",
        help="of every device, or K of them with commas: bytes, 8GiB, 60%% (default: none)",
    )
    parser.add_argument(
        "--one-device", action="store_true", help="the stages take turns on one device, the budget is for all of them"
    )
    parser.add_argument(
        "--schedule", default="auto", metavar="NAME", help="auto, gpipe, 1f1b, interleaved-1f1b (default: auto)"
    )
    parser.add_argument(
        "--checkpoint",
        default="auto",
        choices=("auto", "never", "always", "except_last"),
        help="auto: what the budget asks for; or torchgpipe's policies (default: auto)",
    )
    parser.add_argument(
        "--batch-norm",
        default="refuse",
        choices=("refuse", "per-microbatch"),
        help="per-microbatch: accept statistics of micro-batches, and other gradients (default: refuse)",
    )
    add_tiers(parser)
    add_levers(parser)
    parser.add_argument("--no-prove", action="store_true", help="run nothing but single ops; everything is predicted")
    parser.add_argument("--svg", metavar="PATH", help="draw the timeline of the schedule into a file")
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="write the plan as JSON, - for stdout")


def run(args: argparse.Namespace) -> int:
    """Plans the pipeline, and writes the plan and the timeline of its schedule.

    Returns:
        0.

    Raises:
        BudgetError: if no plan fits.
        MemfitError: other errors of `memfit.pipeline`.
        SpecError: if an option is invalid, or a file cannot be written.
    """
    import memfit
    from memfit.pipelining.plan import encode_pipeline
    from memfit.report.schedule import schedule_svg, schedule_text

    for path in (args.svg, args.json):
        if path not in (None, "-") and not Path(path).resolve().parent.is_dir():
            raise SpecError(f"there is no folder for this file; make it first (path: {path!r})")
    example = build_example(args, args.batch)
    factory = optimizer_factory(args.optimizer)
    loss_fn, target = example.loss_and_target()
    made = memfit.pipeline(
        example.model,
        example.args,
        example.kwargs,
        target=target,
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        budget_per_device=args.budget and (args.budget if len(args.budget) > 1 else args.budget[0]),
        one_device=args.one_device,
        schedule=args.schedule,
        checkpoint=args.checkpoint,
        loss_fn=loss_fn,
        optimizer=None if factory is None else factory(example.model.parameters()),
        batch_norm=args.batch_norm,
        tiers=args.tiers,
        levers=args.levers,
        prove=not args.no_prove,
    )
    plan = made.plan
    if args.json != "-":
        print(f"{example.label}\n{plan}\n{schedule_text(plan.schedule, plan.times())}")
    if args.svg is not None:
        write_text(args.svg, schedule_svg(plan.schedule, plan.times()))
    if args.json is not None:
        write_text(args.json, json.dumps({"kind": "pipeline", **encode_pipeline(plan)}, indent=1))
    return 0
