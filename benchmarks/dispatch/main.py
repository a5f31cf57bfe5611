"""The cost of a call of one of memfit's own kernels: as a function, as lowered graphs call it, and as an op.

python -m benchmarks.dispatch.main
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from memfit.ops.kernels import batch_norm, dropout, row_products
from memfit.ops.kernels.library import direct

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
            calls = (inspect.unwrap(direct(op)), direct(op), op)
            turns = [[_microseconds(call, args) for call in calls] for _ in range(TURNS)]
            medians = [statistics.median(column) for column in zip(*turns, strict=True)]
            print(f"| `{op._opname}` | " + " | ".join(f"{median:.2f}" for median in medians) + " |")


if __name__ == "__main__":
    main()
