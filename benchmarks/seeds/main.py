"""The seeds' experiments, run by memfit.

python -m benchmarks.seeds.main --only 003 --batches 32,64 --run 64 --write
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.report import Report
from benchmarks.seeds import largest_batch, seed001, seed003, seed004
from benchmarks.subject import case_of
from memfit.units import parse_bytes


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    first = report.table("Seed 003: ResNet-50 within 1.49 GB", seed003.COLUMNS, keys=2)
    second = report.table("Seed 004: bytes held after the forward pass", seed004.COLUMNS, keys=2)
    third = report.table("Seed 001: the largest batch", largest_batch.COLUMNS, keys=2)
    fourth = report.table("Seed 001: ResNets by checkpoints, swaps and both", seed001.COLUMNS, keys=3)
    tiers = options.tiers or ("host" if device.type == "cuda" else "disk")
    only = options.only.split(",")
    shape = tuple(int(size) for size in options.shape.split("x"))
    if "003" in only:
        seed003.run(
            report,
            first,
            device,
            spec=options.model,
            shape=shape,
            batches=_numbers(options.batches),
            real=_numbers(options.run),
            budget_bytes=parse_bytes(options.budget),
            cached=options.cached,
        )
    for name, seed in seed004.SEEDS.items():
        if "004" in only or name in only:
            if options.case:
                seed = replace(seed, case=case_of(options.case))
            seed004.run(report, second, device, name, seed, real=bool(options.run), cached=options.cached)
    if "max-batch" in only:
        budget_bytes = parse_bytes(options.batch_budget)
        largest_batch.run(
            report, third, device, spec=options.model, shape=shape, budget_bytes=budget_bytes, tiers=tiers
        )
    for name in seed001.CASES:
        if "001" in only or f"001-{name}" in only:
            case = case_of(options.case) if options.case else seed001.CASES[name]
            real, wall = bool(options.run), options.wall
            seed001.run(report, fourth, device, name, case, tiers=tiers, real=real, wall=wall, cached=options.cached)
            torch._dynamo.reset()
            gc.collect()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds.main", description=__doc__)
    parser.add_argument(
        "--only", default="001,003,004,max-batch", help="001, 001-resnet18, 003, 004, keras-cnn, vgg16, max-batch"
    )
    parser.add_argument(
        "--run", default="", metavar="BATCHES", help="batches of 003 to run for real; any runs 001 and 004 too"
    )
    parser.add_argument("--batches", default="4,8,16,32,64", help="of seed 003")
    parser.add_argument("--budget", default=str(seed003.BUDGET_BYTES) + "B", help="of seed 003")
    parser.add_argument("--batch-budget", default="1GB", help="for max-batch")
    parser.add_argument("--model", default="torchvision:resnet50", help="of seed 003 and max-batch")
    parser.add_argument("--shape", default="3x224x224", help="of seed 003 and max-batch")
    parser.add_argument("--case", default="", help="another SPEC@BATCH@SHAPE for seeds 001 and 004")
    parser.add_argument("--tiers", default=None, help="as for `memfit plan` (default: disk, on CUDA host)")
    parser.add_argument("--wall", type=int, default=3, metavar="N", help="interleaved steps of 001 that are timed")
    parser.add_argument("--cached", action="store_true", help="use the op costs known for this machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the tables into the README")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    main()
