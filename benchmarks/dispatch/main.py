"""What a call of a kernel of memfit costs beyond the kernel: as a function, as lowered graphs call it, as an op.

python -m benchmarks.dispatch.main
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from memfit.ops.kernels import batch_norm, dropout, row_products
from memfit.ops.kernels.library import direct, kernel_of

CALLS, TURNS = 20_000, 15


def _microseconds(call: Callable[..., Any], args: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call(*args)
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    data, channels = torch.randn(2, 4, 2, 2), [torch.rand(4) for _ in range(4)]
    cases = {
        batch_norm.normalise: (data, *channels),
        dropout.masked: (data, torch.ones_like(data), 1.25),
        row_products.product_over_rows: (torch.randn(4, 2), torch.randn(4, 3)),
    }
    print("| kernel, on 32 numbers or fewer | function, µs | `direct(op)`, µs | op, µs |\n| --- | --- | --- | --- |")
    with torch.no_grad():
        for op, args in cases.items():
            calls = (kernel_of(op), direct(op), op)
            turns = [[_microseconds(call, args) for call in calls] for _ in range(TURNS)]
            medians = [statistics.median(column) for column in zip(*turns, strict=True)]
            print(f"| `{op._opname}` | " + " | ".join(f"{median:.2f}" for median in medians) + " |")


if __name__ == "__main__":
    main()
