"""Weight gradients of convolutions: made by the kernel and added, or added as products of matrices.

python -m benchmarks.pipeline.convolutions --write
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import fx

from benchmarks.report import Report
from benchmarks.subject import Case, case_of
from memfit import zoo
from memfit.capture.options import CaptureOptions
from memfit.capture.training_step import capture_step
from memfit.fxir.signature import cost_key, tensors_of
from memfit.ops.accumulation import Accumulate
from memfit.ops.kernels.conv_weight_gemm import add_weight_product
from memfit.profiling.synthetic_inputs import operand_values

CASES = (
    "torchvision:resnet101@1@3x64x64",
    "torchvision:resnet101@4@3x64x64",
    "torchvision:resnet101@16@3x64x64",
    "torchvision:resnet101@2@3x224x224",
    "torchvision:densenet121@4@3x64x64",
    "torchvision:mobilenet_v3_large@4@3x224x224",
    "torchvision:vgg16@2@3x64x64",
)

COLUMNS = ("micro-batch", "products", "kernel and sum ms", "product ms", "times as quick", "least of one shape", "most")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.convolutions", description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help="SPEC@BATCH@SHAPE, comma-separated")
    parser.add_argument("--repeats", type=int, default=15, help="runs of each, in turns")
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    options = parser.parse_args(arguments)
    report = Report(Path(__file__).with_name("README.md"), write=options.write, device=torch.device("cpu"))
    table = report.table("Weight gradients of convolutions", COLUMNS)
    for case in map(case_of, options.only.split(",")):
        report.add(table, *_row(case, options.repeats))


def _row(case: Case, repeats: int) -> tuple[str, ...]:
    example = zoo.build(case.spec, batch=case.batch, shape=case.shape)
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in example.model.modules())
    calls = _products(example)
    often = Counter(map(cost_key, calls))
    seconds = {key: _seconds(call, repeats) for key, call in {cost_key(call): call for call in calls}.items()}
    by_kernel, as_product = (sum(often[key] * both[way] for key, both in seconds.items()) for way in (0, 1))
    ratios = [kernel / product for kernel, product in seconds.values()]
    return (
        f"{case.name} {case.batch}×{'×'.join(map(str, case.shape or ()))}",
        f"{len(calls)} of {convolutions}",
        f"{by_kernel * 1e3:.1f}",
        f"{as_product * 1e3:.1f}",
        f"{by_kernel / as_product:.2f}",
        f"{min(ratios):.2f}",
        f"{max(ratios):.2f}",
    )


def _products(example: zoo.Example) -> list[fx.Node]:
    """The calls that a stage of several micro-batches adds as products."""
    capture = capture_step(
        example.model, example.args, example.kwargs, options=CaptureOptions(accumulate=Accumulate.AS_MADE)
    )
    return [
        op.node
        for subgraph in capture.subgraphs.subgraphs
        for op in subgraph.reading.ops
        if op.node.target is torch.ops.aten.convolution_backward.default
        and not subgraph.reading.added_as_made.isdisjoint(op.writes)
    ]


def _seconds(call: fx.Node, repeats: int) -> tuple[float, float]:
    """Of the kernel with the sum, and of the product."""
    values = operand_values(call, torch.device("cpu"))
    args = fx.map_arg(call.args, values.__getitem__)
    (made,) = tensors_of(call)
    total = torch.zeros(made.shape, dtype=made.dtype)

    def kernel() -> None:
        total.add_(torch.ops.aten.convolution_backward.default(*args)[1])

    ways: tuple[Callable[[], None], ...] = (kernel, functools.partial(add_weight_product, total, *args))
    took: list[list[float]] = [[], []]
    with torch.no_grad():
        for way in ways:
            way()
        for _ in range(repeats):
            for way, seconds in zip(ways, took, strict=True):
                start = time.perf_counter()
                way()
                seconds.append(time.perf_counter() - start)
    of_kernel, of_product = map(median, took)
    return of_kernel, of_product


if __name__ == "__main__":
    main()
