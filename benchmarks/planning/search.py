"""Counted work of searches next to the clock: each search twice, alone and beside a busy thread.

python -m benchmarks.planning.search --only resnet50,gpt2-6 --budgets 50,35
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch

from benchmarks.busy import busy
from benchmarks.report import Report
from benchmarks.subject import Case, Subject, case_of
from memfit.errors import BudgetError
from memfit.ir.graph import StepGraph
from memfit.planner.effort import Effort
from memfit.planner.offload.search import find_program
from memfit.planner.search.portfolio import Found

CASES: dict[str, Case] = {
    "gpt2-6": Case(spec="hf:gpt2?n_layer=6&n_embd=128&n_head=4&vocab_size=512", batch=4, shape=(128,)),
    "resnet50": Case(spec="torchvision:resnet50", batch=8, shape=(3, 128, 128)),
    "mobilenet_v2": Case(spec="torchvision:mobilenet_v2", batch=8, shape=(3, 96, 96)),
    "vit_tiny": Case(spec="timm:vit_tiny_patch16_224", batch=4, shape=(3, 224, 224)),
    "densenet121": Case(spec="torchvision:densenet121", batch=4, shape=(3, 96, 96)),
    "resnet152": Case(spec="torchvision:resnet152", batch=8, shape=(3, 224, 224)),
    "gpt2-24": Case(spec="hf:gpt2?n_layer=24&n_embd=256&n_head=4&vocab_size=1024", batch=4, shape=(256,)),
}

COLUMNS = (
    "model",
    "budget, % of the baseline peak above static bytes",
    "ops",
    "overhead of the plan, profiled %",
    "work, nominal s",
    "clock s",
    "clock s beside a busy thread",
    "same program and work",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.search", description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help=f"out of {', '.join(CASES)}, or SPEC@BATCH@SHAPE")
    parser.add_argument("--budgets", default="75,50,35", help="percent of the baseline peak above static bytes")
    parser.add_argument("--seconds", type=float, default=8.0, help="search_seconds")
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=device)
    table = report.table("Searches by counted work", COLUMNS, keys=2)
    for name in options.only.split(","):
        subject = Subject.of(CASES.get(name) or case_of(name), device, cached=True)
        graph, plain = subject.graph, subject.plain.peak_bytes
        for share in options.budgets.split(","):
            budget = graph.static_bytes + int((plain - graph.static_bytes) * float(share) / 100)
            found, work, seconds = _search(graph, budget, options.seconds)
            with busy():
                again, work_again, beside = _search(graph, budget, options.seconds)
            same = (found and found.program) == (again and again.program) and work == work_again
            report.add(
                *(table, name, share, len(graph.ops)),
                "no plan" if found is None else f"{100 * found.timeline.overhead:.2f}",
                *(f"{work:.1f}", f"{seconds:.1f}", f"{beside:.1f}", "yes" if same else "no"),
            )
        torch._dynamo.reset()
        gc.collect()


def _search(graph: StepGraph, budget: int, seconds: float) -> tuple[Found | None, float, float]:
    """A program, the work of its search in nominal seconds, and the seconds by the clock."""
    effort, begin, found = Effort(), time.perf_counter(), None
    try:
        found = find_program(graph, budget, seconds=seconds, effort=effort)
    except BudgetError:
        pass  # no plan fits; finding that out is work too
    return found, effort.seconds, time.perf_counter() - begin


if __name__ == "__main__":
    main()
