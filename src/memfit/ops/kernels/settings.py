"""Settings that choose kernels in addition to the call itself: threads, and the precision of float32 products.

Costs, and the ops that give the same bits in chunks, were measured with one choice of kernels. The precision is read
from each backend: `torch.get_float32_matmul_precision` raises where only one of them was set (seen with torch 2.14).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["kernel_settings", "multiplies_in_full"]

_backends: Any = torch.backends  # some of their settings are not known to type checkers


def kernel_settings(device_type: str) -> tuple[object, ...]:
    """Settings that choose the kernels of a device type; equal tuples mean the same choice."""
    if device_type == "cuda":
        cudnn = _backends.cudnn
        precision = (_backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision)
        return (*precision, cudnn.deterministic, cudnn.benchmark, cudnn.enabled)
    return (torch.get_num_threads(), _backends.mkldnn.matmul.fp32_precision, _backends.mkldnn.conv.fp32_precision)


def multiplies_in_full(dtype: torch.dtype) -> bool:
    """Whether products of matrices on CPU have the precision of their dtype."""
    return dtype is not torch.float32 or _backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
