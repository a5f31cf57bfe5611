"""Several processes with gloo: cuts by measured time against as many layers in each stage, and budgets of a device.

python -m benchmarks.pipeline.processes --write

First a GPT whose output layer is as heavy as many blocks, on two processes of one thread each. Then the same model on
stages whose device has a third of what its baseline step takes: the least number of stages is looked for, and its
pipeline trained.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import memfit
from benchmarks.report import Report
from memfit import zoo
from memfit.capture.residents import storage_bytes
from memfit.profiling.memory import measure
from memfit.tools.sequential_pipeline import as_sequential, equal_ends
from memfit.tools.training_loop import training_step

COLUMNS = (
    "model",
    "K",
    "M",
    "system",
    "step s",
    "samples/s",
    "over memfit's best",
    "peak of each process MiB",
    "predicted MiB",
)
_MIB = 1 << 20


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:seed-gpt2?vocabulary=50000&dropout=0.0")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", help="of each device for memfit: bytes, 8GiB")
    parser.add_argument("--schedules", default="1f1b", help="of memfit, with commas")
    parser.add_argument("--alone", action="store_true", help="without cuts by layers")
    parser.add_argument("--plain", action="store_true", help="with the step on one device, unplanned")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=torch.device("cpu"))
    table = report.table("Processes: one thread each, gloo, steps in turns", COLUMNS, keys=4)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(vars(options), folder), nprocs=options.stages, join=True)
        found = json.loads((Path(folder) / "result.json").read_text())
    label = options.model.partition(":")[2] + f" · batch {options.batch}"
    label += f" · {options.budget} a device" if options.budget else ""
    ours = min(row["seconds"] for system, row in found.items() if system.startswith("memfit"))
    for system, row in found.items():
        cells = (
            *(label, str(options.stages), str(options.microbatches), system, f"{row['seconds']:.3f}"),
            f"{options.batch / row['seconds']:.2f}",
            f"{row['seconds'] / ours:.2f}",
            " ".join(f"{peak / _MIB:.0f}" for peak in row["peaks"]),
            " ".join(f"{peak / _MIB:.0f}" for peak in row.get("predicted", ())),
        )
        report.add(table, *cells)


def _process(rank: int, options: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = options["stages"]
    store = dist.FileStore(str(Path(folder) / "rendezvous"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=900))
    steps: dict[str, Any] = {}
    models: dict[str, Any] = {}
    predicted: dict[str, list[int]] = {}
    for schedule in options["schedules"].split(","):
        name = f"memfit {schedule}"
        models[name], steps[name], predicted[name] = _planned(rank, schedule, options)
    if not options["alone"]:
        models["equal-layers"], steps["equal-layers"] = _equal_layers(rank, options)
    found: dict[str, Any] = {}
    for system, step in steps.items():
        for parameter in models[system].parameters():
            parameter.grad = None
        step()
        dist.barrier()
        measured = measure(step, warmup=0, repeats=0, start_bytes=0).peak_bytes
        held = {id(p): p for p in models[system].parameters() if p.grad is not None}
        measured += 2 * sum(p.untyped_storage().nbytes() for p in held.values())
        peaks = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(peaks, torch.tensor([measured]))
        found[system] = {"peaks": [int(peak) for peak in peaks], "all": [], "predicted": predicted.get(system, [])}
    for turn in range(options["repeats"]):
        for system in steps if turn % 2 == 0 else reversed(steps):
            dist.barrier()
            begin = time.perf_counter()
            steps[system]()
            dist.barrier()
            found[system]["all"].append(time.perf_counter() - begin)
    for row in found.values():
        row["seconds"] = statistics.median(row.pop("all"))
    if rank == 0 and options["plain"]:
        found["plain, one device"] = _plain(options)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _planned(rank: int, schedule: str, options: dict[str, Any]) -> tuple[torch.nn.Module, Any, list[int]]:
    """memfit's pipeline of a schedule: the model, what runs a step, and the peaks predicted."""
    ours = zoo.build(options["model"], batch=options["batch"])
    loss_fn, target = ours.loss_and_target()
    pipe = memfit.pipeline(
        *(ours.model, ours.args),
        target=target,
        loss_fn=loss_fn,
        num_stages=options["stages"],
        num_microbatches=options["microbatches"],
        schedule=schedule,
        budget_per_device=options["budget"],
        prove=options["budget"] is not None,
    )
    if rank == 0:
        print(pipe.plan, file=sys.stderr)
    return ours.model, lambda: pipe.step(*ours.args, target=target), list(pipe.plan.peak_bytes)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """The unplanned step on one device."""
    example = zoo.build(options["model"], batch=options["batch"])
    loss_fn, target = example.loss_and_target()
    step = training_step(example.model, example.model, example.args, {}, loss_fn=lambda output: loss_fn(output, target))
    start = storage_bytes([*example.model.parameters(), *example.args, target], "cpu")
    measured = measure(step, warmup=1, repeats=1, start_bytes=start)
    return {"peaks": [measured.peak_bytes], "seconds": measured.step_seconds}


def _equal_layers(rank: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """PyTorch's own 1F1B, as many layers in each stage."""
    example = zoo.build(options["model"], batch=options["batch"])
    loss_fn, target = example.loss_and_target()
    layers = as_sequential(example.model)
    world = options["stages"]
    ends = [0, *equal_ends(layers, world)]
    part = layers[ends[rank] : ends[rank + 1]]
    crossing = example.args[0].chunk(options["microbatches"])[0]
    with torch.no_grad():
        for stage in range(rank):
            crossing = layers[ends[stage] : ends[stage + 1]](crossing)
        left = part(crossing)
    stage = PipelineStage(
        part,
        rank,
        world,
        torch.device("cpu"),
        input_args=(crossing.detach().requires_grad_(rank > 0),),
        output_args=(left.detach().requires_grad_(),),
    )
    schedule = Schedule1F1B(stage, options["microbatches"], loss_fn=loss_fn)

    def step() -> None:
        if rank == 0:
            schedule.step(example.args[0])
        elif rank == world - 1:
            schedule.step(target=target, losses=[], return_outputs=False)
        else:
            schedule.step()

    return part, step


if __name__ == "__main__":
    main()
