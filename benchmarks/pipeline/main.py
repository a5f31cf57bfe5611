"""Seed 002's table: memfit, torchgpipe and PyTorch's engine cut by layers, all stages in one process.

python -m benchmarks.pipeline.main --model 'zoo:seed-gpt2?dropout=0.0' --batch 64 --write
"""

from __future__ import annotations

import argparse
import gc
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Report
from memfit import zoo
from memfit.tools.compare_pipelines import SYSTEMS, Cell, PipelineRow, compare_cell
from memfit.tools.sequential_pipeline import as_sequential

COLUMNS = (
    "K",
    "M",
    "checkpoint",
    "system",
    "activations MiB",
    "total MiB",
    "forward s",
    "backward s",
    "samples/s",
    "memfit / it",
    "how",
)
_MIB = 1 << 20


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=torch.device("cpu"))
    example = zoo.build(options.model, batch=options.batch, shape=options.shape)
    as_sequential(example.model)  # a model that is no list of layers is told at once
    parameters = sum(p.numel() for p in example.model.parameters())
    table = report.table(f"Seed 002: {example.label}, {parameters:,} parameters", COLUMNS, keys=4)

    def make() -> tuple[Any, ...]:
        made = zoo.build(options.model, batch=options.batch, shape=options.shape)
        loss_fn, target = made.loss_and_target()
        return made.model, made.args[0], target, loss_fn

    for stages, microbatches, checkpointed in product(options.stages, options.microbatches, (False, True)):
        cell = Cell(num_stages=stages, num_microbatches=microbatches, checkpointed=checkpointed)
        rows = compare_cell(make, cell, systems=options.systems, repeats=options.repeats)
        for row in rows:
            report.add(table, *_cells(row))
        gc.collect()


def _cells(row: PipelineRow) -> tuple[str, ...]:
    return (
        str(row.cell.num_stages),
        str(row.cell.num_microbatches),
        "on" if row.cell.checkpointed else "off",
        row.system,
        f"{row.activation_bytes / _MIB:.0f}",
        f"{row.total_bytes / _MIB:.0f}",
        f"{row.forward_seconds:.3f}",
        f"{row.backward_seconds:.3f}",
        f"{row.samples_per_second:.2f}",
        f"{row.memfit_speedup:.2f}" if row.memfit_speedup else "",
        row.note,
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:seed-gpt2?dropout=0.0")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--shape", type=lambda text: tuple(numbers(text)))
    parser.add_argument("--stages", type=numbers, default=[1, 2, 4])
    parser.add_argument("--microbatches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--systems", type=lambda text: tuple(text.split(",")), default=SYSTEMS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
