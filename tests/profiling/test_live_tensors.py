"""Tensors of a process are counted whatever their layout, and wrappers have no memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfit
from memfit.profiling.memory import allocation_peak, largest_tensors, live_tensor_bytes


def test_sparse_tensors_count_by_their_parts() -> None:
    before = live_tensor_bytes("cpu")
    indices, values = torch.arange(1000).view(1, -1), torch.ones(1000, 3)
    held = torch.sparse_coo_tensor(indices, values, (10_000, 3), is_coalesced=True)
    assert live_tensor_bytes("cpu") - before == indices.nbytes + values.nbytes
    rows = torch.eye(50).to_sparse_csr()
    made = sum(t.untyped_storage().nbytes() for t in (rows.crow_indices(), rows.col_indices(), rows.values()))
    assert live_tensor_bytes("cpu") - before == indices.nbytes + values.nbytes + made
    assert "(10000, 3)" in largest_tensors(100_000)
    del held


def test_wrappers_of_transforms_that_a_program_holds_are_no_error() -> None:
    held: list[Any] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        held.append(x)
        return x.square().sum()

    torch.func.grad(loss)(torch.ones(4))
    torch.vmap(torch.func.grad(loss))(torch.ones(3, 4))
    model = torch.nn.Linear(4, 4)
    assert memfit.measure(lambda: model(torch.ones(2, 4)).sum().backward(), warmup=1, repeats=1).peak_bytes > 0
    assert held


@pytest.mark.parametrize("profiled", [False, True])
def test_frees_of_earlier_memory_do_not_count(profiled: bool) -> None:
    """The allocator knows the sizes of blocks that were allocated under a profiler, and reports only their frees."""
    held: list[torch.Tensor] = []

    def step() -> None:
        held[:] = [torch.ones(1000)]

    for _ in range(3):
        if profiled:
            assert allocation_peak(step) == 4000
        else:
            step()
    assert allocation_peak(step) == 4000
    assert allocation_peak(lambda: held.append(torch.ones(1000) + held.pop().sum())) == 2 * 4000 + 4
    assert allocation_peak(held.clear) == 0
