"""Computes gradients whose formula looks at values by eager's own formula, while a graph is made.

Eager autograd divides a product by its factors if none of them is zero, and uses a longer formula if one is. For fake
tensors, which have no values, autograd always uses a longer formula, which has different bits and takes more memory. So
here the gradients of `prod` and `cumprod` are separate ops, whose kernels call autograd on the real tensors.

*Idea*: ours; the ops are those whose backward formulas in PyTorch check whether a tensor is a subclass and then compute
differently (`prod_backward` and `cumprod_backward` of its `FunctionsManual.cpp`).

Known limits: the kernel recomputes the forward result, since autograd accepts no other. Gradients have the layout of
the data, while eager's longer formula makes contiguous ones. Second derivatives are not available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from memfit.capture.eager.python_kernels import kernels_in_place

__all__ = ["asking_autograd", "gradients_on_values"]

_aten = torch.ops.aten

_LIBRARY = torch.library.Library("memfit", "FRAGMENT")


@contextmanager
def asking_autograd() -> Iterator[None]:
    """While active, autograd records the calls of a kernel, although the kernel itself runs below autograd."""
    with ExitStack() as around:
        around.enter_context(torch.enable_grad())
        for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
            around.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


def _gradient_of(forward: torch._ops.OpOverload, name: str, settings: str) -> torch._ops.OpOverload:
    """Defines the op for the gradient of a forward op, which takes the data and these settings."""

    def kernel(gradient: torch.Tensor, data: torch.Tensor, result: torch.Tensor, *more: Any) -> torch.Tensor:
        with asking_autograd():
            leaf = data.detach().requires_grad_()
            (made,) = torch.autograd.grad(_called(forward, leaf, more), leaf, gradient)
        wanted = torch.empty_like(data)
        return made if made.stride() == wanted.stride() else wanted.copy_(made)

    def fake(gradient: torch.Tensor, data: torch.Tensor, result: torch.Tensor, *more: Any) -> torch.Tensor:
        return torch.empty_like(data)

    _LIBRARY.define(f"{name}(Tensor gradient, Tensor data, Tensor result, {settings}) -> Tensor")
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memfit::{name}", fake, lib=_LIBRARY)
    made: torch._ops.OpOverload = getattr(torch.ops.memfit, name).default
    return made


def _called(forward: torch._ops.OpOverload, data: torch.Tensor, settings: tuple[Any, ...]) -> torch.Tensor:
    """The forward op's result; its last setting, the dtype of the result, is passed by keyword."""
    *places, dtype = settings
    made: torch.Tensor = forward(data, *places, dtype=dtype)
    return made


_GRADIENTS = {
    _aten.prod.default: _gradient_of(_aten.prod.default, "prod_gradient", "ScalarType? dtype"),
    _aten.prod.dim_int: _gradient_of(
        _aten.prod.dim_int, "prod_along_gradient", "int dim, bool keepdim, ScalarType? dtype"
    ),
    _aten.cumprod.default: _gradient_of(_aten.cumprod.default, "cumprod_gradient", "int dim, ScalarType? dtype"),
}
"""The gradient op of each forward op."""


class _Recorded(torch.autograd.Function):
    """A forward op that autograd records with its op of `_GRADIENTS`."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, forward: torch._ops.OpOverload, settings: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = _called(forward, data, settings)
        ctx.save_for_backward(data, result)
        ctx.op, ctx.settings = _GRADIENTS[forward], settings
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.op(gradients[0], *ctx.saved_tensors, *ctx.settings), None, None


def gradients_on_values() -> AbstractContextManager[None]:
    """While active, `prod` and `cumprod` are recorded with gradients that look at values as in eager mode."""
    return kernels_in_place({forward: _recorded(forward) for forward in _GRADIENTS}, DispatchKey.Autograd)


def _recorded(forward: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    defaults = [argument.default_value for argument in forward._schema.arguments[1:-1]]

    def recorded(data: torch.Tensor, *places: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        made: torch.Tensor = _Recorded.apply(data, forward, (*places, *defaults[len(places) :], dtype))
        return made

    return recorded
