"""Device memory that libraries allocate at their first call and keep.

cuBLAS takes a workspace for each thread that calls it, from PyTorch's allocator; a training step calls it from two
threads, the caller's thread for the forward pass and autograd's thread for the backward pass. The workspace stays
allocated, so it belongs to the step like parameters.

Matrix products call cuBLAS, and plain code may. Some convolutions call it too, depending on their shapes: they are run
once, and the memory that is left allocated shows it.

Known limits: cuBLAS only; cuDNN, cuSOLVER and the driver allocate elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import fx

from memfit.ir.graph import StepGraph
from memfit.profiling.synthetic_inputs import operands_of
from memfit.torch_compat.core import clear_cublas_workspaces

__all__ = ["library_bytes"]

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_mm.", "aten.addmv.", "aten.mv.")


def library_bytes(
    graph: StepGraph, device: torch.device, calls: Sequence[fx.Node] = (), *, plain_code: bool = False
) -> int:
    """Bytes that libraries hold on the device once the step has run.

    Args:
        graph: graph of the step.
        device: device on which the step runs.
        calls: calls of the step; convolutions among them are run if no product shows already that cuBLAS is called.
        plain_code: whether plain code, of which nothing is known, runs in addition to the graph.
    """
    if device.type != "cuda":
        return 0
    known = plain_code or any(op.target.startswith(_PRODUCTS) for op in graph.ops)
    return _cublas_bytes(device) if known or _keeps_memory(calls, device) else 0


def _keeps_memory(calls: Sequence[fx.Node], device: torch.device) -> bool:
    """Whether library memory stays allocated after convolutions have run."""
    convolutions = [call for call in calls if "convolution" in str(call.target)]
    if not convolutions:
        return False
    clear_cublas_workspaces()
    before = torch.cuda.memory_allocated(device)
    for call in convolutions:
        try:
            args, kwargs = operands_of(call, device)
            call.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, IndexError, ValueError):  # it cannot run alone
            pass
        args, kwargs = (), {}
    return bool(torch.cuda.memory_allocated(device) > before)


@lru_cache
def _cublas_bytes(device: torch.device) -> int:
    clear_cublas_workspaces()
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad():
        data = torch.ones(32, 32, device=device, requires_grad=True)
        torch.nn.functional.linear(data, data, data[0]).sum().backward()
    del data
    return max(0, torch.cuda.memory_allocated(device) - before)
