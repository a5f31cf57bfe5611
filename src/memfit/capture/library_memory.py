"""Device memory that libraries take at their first call and keep.

cuBLAS takes a workspace for each thread that calls it, from PyTorch's allocator; a training step calls it from two, the
caller's for the forward pass and autograd's for the backward pass. It stays, so it belongs to the step like parameters.

Known limits: cuBLAS only; cuDNN, cuSOLVER and the driver allocate elsewhere.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from memfit.step.graph import StepGraph

__all__ = ["library_bytes"]

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_mm.", "aten.addmv.", "aten.mv.")


def library_bytes(graph: StepGraph, device: torch.device) -> int:
    """What libraries hold on the device as soon as the step has run once."""
    if device.type != "cuda" or not any(op.target.startswith(_PRODUCTS) for op in graph.ops):
        return 0
    return _cublas_bytes(device)


@lru_cache
def _cublas_bytes(device: torch.device) -> int:
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    with torch.enable_grad():
        data = torch.ones(32, 32, device=device, requires_grad=True)
        torch.nn.functional.linear(data, data, data[0]).sum().backward()
    del data
    return max(0, torch.cuda.memory_allocated(device) - before)
