"""Tensors of a process are counted whatever their layout, and wrappers have no memory of their own."""

from __future__ import annotations

from typing import Any

import torch

import memfit
from memfit.profiling.memory import largest_tensors, live_tensor_bytes


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
