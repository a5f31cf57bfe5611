"""Keys of the properties that the cost of a call, and its bits, depend on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfit.fxir.call import Call
from memfit.torch_compat.core import OpOverload

__all__ = ["cost_key", "describe", "tensors_of"]


def cost_key(node: fx.Node | Call) -> str:
    """Key of the properties that the cost of a call depends on: op, shapes, strides, dtypes, constants."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, OpOverload):
        target = str(node.target)
    named = [f"{k}={describe(v)}" for k, v in sorted(node.kwargs.items())]
    return f"{target}({','.join([*(describe(a) for a in node.args), *named])})"


def describe(value: Any) -> str:
    """Describes an argument: dtype, shape and strides of a node's tensor, the items of a list, or a constant."""
    if isinstance(value, fx.Node):
        tensors = tensors_of(value)
        if tensors and not isinstance(value.meta.get("val"), list | tuple):
            t = tensors[0]
            return f"{str(t.dtype)[6:]}{list(t.shape)}{list(t.stride())}"
        return f"<{value.meta.get('val')!r}>"
    if isinstance(value, list | tuple):
        return "(" + ",".join(describe(v) for v in value) + ")"
    return repr(value)


def tensors_of(node: fx.Node | Call) -> list[torch.Tensor]:
    """The fake tensors a node yields, nested results flattened."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for t in value if isinstance(t, torch.Tensor)]
    return []
