"""Snapshots of everything reachable: what planning must leave as it was, and what two runs must agree on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["differences", "same", "snapshot"]

Snapshot = dict[str, Any]

_CODE = {"_compiled_call_impl", "function"}
"""Attributes that are code: the fitted call, and what a block computes."""


def snapshot(**roots: Any) -> Snapshot:
    """Copies of all tensors, gradients, generator states and plain values reachable from some objects.

    The states of torch's, Python's and NumPy's generators and torch's settings come with them.

    Args:
        roots: by name; modules, losses, optimizers, inputs.
    """
    found: Snapshot = {}
    seen: set[int] = set()
    for name, root in roots.items():
        found.update(_walk(root, name, seen))
    found["random.torch"] = torch.get_rng_state()
    found["random.cuda"] = torch.cuda.get_rng_state().cpu() if torch.cuda.is_initialized() else None
    found["random.python"] = random.getstate()
    found["random.numpy"] = tuple(map(str, np.random.get_state()))
    found["setting.autocast"] = torch.is_autocast_enabled("cpu")
    found["setting.gradients"] = torch.is_grad_enabled()
    found["setting.dtype"] = torch.get_default_dtype()
    return found


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool | int | float | str | torch.dtype | torch.Size | None):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
        yield f"{path}.requires_grad", value.requires_grad
        if value.is_leaf:
            yield f"{path}.grad", None if value.grad is None else value.grad.detach().clone()
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, dict):
        for key, item in value.items():
            name = key if isinstance(key, str | int) else f"<{type(key).__name__}>"
            if name not in _CODE:
                yield from _walk(item, f"{path}.{name}", seen)
        yield f"{path}.len", len(value)
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]", seen)
        yield f"{path}.len", len(value)
    elif isinstance(value, nn.Module | torch.optim.Optimizer) or type(value).__module__.startswith("benchmarks."):
        for name, item in vars(value).items():
            if name not in _CODE:
                yield from _walk(item, f"{path}.{name}", seen)


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Paths of what is not the same in two snapshots."""
    names = dict.fromkeys((*before, *after))
    return [name for name in names if name not in before or name not in after or not same(before[name], after[name])]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors bit by bit; a NaN equals a NaN of other bits."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(type(a) is type(b) and (a == b or (a != a and b != b)))
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if torch.equal(_bits(a), _bits(b)):
        return True
    return a.is_floating_point() and bool(((_bits(a) == _bits(b)) | (a.isnan() & b.isnan())).all())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
