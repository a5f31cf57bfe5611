"""Fake results for calls that kernels run but PyTorch's fake tensors refuse.

The check of `torch._grouped_mm` for fake tensors knows the CUDA kernels for half precision. In single precision another
kernel runs, on every device, and every mixture-of-experts model of transformers calls that kernel. Such a model could
not be captured.

*Idea*: while memfit captures, fake tensors get the rule of the kernel: the shapes of a grouped product, with rows that
begin at multiples of 16 bytes (`create_grouped_gemm_output_tensor` in PyTorch's `GroupedMMUtils.h`).

Known limits: PyTorch's table of rules is shared by the process, so code that another thread compiles meanwhile gets
this rule too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from memfit.torch_compat.core import FakeTensorMode, fake_impls

__all__ = ["grouped_product_layout", "rules_of_kernels"]

_grouped_mm = torch.ops.aten._grouped_mm.default
_ROW_BYTES = 16
_LOCK = threading.Lock()


@contextlib.contextmanager
def rules_of_kernels() -> Iterator[None]:
    """While active, fake tensors follow the rules of kernels whose calls they otherwise refuse."""
    with _LOCK:
        added = _grouped_mm not in fake_impls.op_implementations_dict
        if added:
            fake_impls.register_op_impl(_grouped_mm)(_grouped_product)
    try:
        yield
    finally:
        if added:
            with _LOCK:
                fake_impls._deregister_op_impl(_grouped_mm)


def grouped_product_layout(left: torch.Tensor, right: torch.Tensor, groups: int) -> tuple[list[int], list[int]]:
    """Shape and strides of a grouped product.

    Args:
        left: (rows, inner), or (groups, rows, inner).
        right: (inner, columns), or (groups, inner, columns).
        groups: number of groups, where neither operand has an axis of groups.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    row = -(-columns * left.element_size() // _ROW_BYTES) * _ROW_BYTES // left.element_size()
    if left.dim() != right.dim():
        return [rows, columns], [row, 1]
    if left.dim() == 3:
        groups = left.shape[0]
    return [groups, rows, columns], [rows * row, row, 1]


def _grouped_product(fake_mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    left, right, ends = given["self"], given["mat2"], given.get("offs")
    if left.dtype is not torch.float32 or right.dtype is not torch.float32:
        return NotImplemented
    shape, strides = grouped_product_layout(left, right, 0 if ends is None else len(ends))
    with fake_mode:
        return torch.empty_strided(shape, strides, dtype=given.get("out_dtype") or left.dtype, device=left.device)
