"""Gradients of quantiles by eager's own formula, while a graph is made.

A quantile lies between two elements, and its gradient goes to these two. Eager PyTorch selects them by partial sorting
where it can look at the values; for fake tensors, which have no values, PyTorch sorts. Where several elements are
equal, as after a running maximum or a rectifier, sorting selects other elements: the value is the same, but the
gradient goes to other elements. So here the gradient is a separate op, whose kernel calls autograd on the real tensors.

*Idea*: that of `memfit.capture.eager.gradients_on_values`, for calls that consist of several ops.

Known limits: the kernel recomputes the forward result. Second derivatives are not available, and a call whose `q`
requires a gradient is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.capture.eager.gradients_on_values import asking_autograd
from memfit.capture.eager.python_kernels import kernels_in_place
from memfit.ops.kernels.library import custom_op
from memfit.torch_compat.core import AutoDispatchBelowAutograd, DispatchKey, OpOverload

__all__ = ["no_quantiles", "quantiles_of_eager"]

_aten = torch.ops.aten
_KEY = DispatchKey.CompositeImplicitAutograd


def _lying(
    gradient: torch.Tensor, data: torch.Tensor, q: torch.Tensor, dim: int | None, *settings: Any
) -> torch.Tensor:
    """An empty tensor laid out like eager's gradient: contiguous, with the axis of the quantile moved to the end."""
    if dim is None or data.dim() == 0:
        return data.new_empty(data.shape)
    return data.new_empty(data.transpose(dim, -1).shape).transpose(dim, -1)


@custom_op(
    "quantile_gradient(Tensor gradient, Tensor data, Tensor q, int? dim, bool keepdim, str interpolation, "
    "bool skips_nan) -> Tensor",
    fake=_lying,
)
def _gradient(
    gradient: torch.Tensor,
    data: torch.Tensor,
    q: torch.Tensor,
    dim: int | None,
    keepdim: bool,
    interpolation: str,
    skips_nan: bool,
) -> torch.Tensor:
    with asking_autograd():
        leaf = data.detach().requires_grad_()
        call = torch.nanquantile if skips_nan else torch.quantile
        result = call(leaf, q, dim, keepdim, interpolation=interpolation)
        (made,) = torch.autograd.grad(result, leaf, gradient)
    wanted = _lying(gradient, data, q, dim, keepdim, interpolation, skips_nan)
    return made if made.stride() == wanted.stride() else wanted.copy_(made)


class _Quantile(torch.autograd.Function):
    """A quantile that autograd records with `quantile_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, q: torch.Tensor, dim: int | None, keepdim: bool, interpolation: str, op: Any
    ) -> Any:
        with AutoDispatchBelowAutograd():
            # `decompose` would look up the kernel registered here and call this function again.
            result = op._op_dk(_KEY, data, q, dim, keepdim, interpolation=interpolation)
        ctx.save_for_backward(data, q)
        ctx.settings = (dim, keepdim, interpolation, op is _aten.nanquantile.default)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        made = _gradient(gradients[0], *ctx.saved_tensors, *ctx.settings)
        return made, None, None, None, None, None


def quantiles_of_eager() -> AbstractContextManager[None]:
    """While active, quantiles are recorded with gradients that look at values as in eager mode."""
    kernels: dict[OpOverload, Callable[..., Any]] = {}
    for packet in (_aten.quantile, _aten.nanquantile):
        kernels |= {packet.default: _recorded(packet.default), packet.scalar: _recorded(packet.scalar)}
    return kernels_in_place(kernels, _KEY)


def no_quantiles() -> AbstractContextManager[None]:
    """While active, quantiles raise: PyTorch sorts fake tensors, which takes more memory than its partial sorting."""
    packets = (_aten.quantile, _aten.nanquantile)
    return kernels_in_place(dict.fromkeys((op for p in packets for op in (p.default, p.scalar)), _unknown), _KEY)


def _unknown(*_: Any, **__: Any) -> None:
    raise NotImplementedError("a quantile looks at values")


def _recorded(called: OpOverload) -> Callable[..., torch.Tensor]:
    op = (
        _aten.quantile.default
        if called in (_aten.quantile.default, _aten.quantile.scalar)
        else _aten.nanquantile.default
    )

    def recorded(
        data: torch.Tensor,
        q: torch.Tensor | float,
        dim: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> torch.Tensor:
        made: torch.Tensor
        if not torch.is_grad_enabled() or not data.requires_grad or (isinstance(q, torch.Tensor) and q.requires_grad):
            made = called._op_dk(_KEY, data, q, dim, keepdim, interpolation=interpolation)
            return made
        at = q if isinstance(q, torch.Tensor) else torch.scalar_tensor(q, dtype=data.dtype, device=data.device)
        made = _Quantile.apply(data, at, dim, keepdim, interpolation, op)
        return made

    return recorded
