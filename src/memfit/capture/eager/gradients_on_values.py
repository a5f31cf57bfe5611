"""Computes gradients whose formula looks at values by eager's own formula, while a graph is made.

Eager autograd divides a product by its factors if none of them is zero, and uses a longer formula if one is; it shares
the gradient of a maximum among the elements that are equal to it, and asks first whether the maximum is NaN. For fake
tensors, which have no values, autograd always uses a longer formula, which has other bits or another layout and takes
other memory. So here these gradients are separate ops, whose kernels call autograd on the real tensors.

*Idea*: ours; the ops are those whose backward formulas in PyTorch check whether a tensor is a subclass and then compute
differently (`prod_backward`, `cumprod_backward` and `evenly_distribute_backward` of its `FunctionsManual.cpp`).

Known limits: the kernel recomputes the forward result, since autograd accepts no other. Gradients of products have the
layout of the data, while eager's longer formula makes contiguous ones. Second derivatives are not available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from memfit.capture.eager.python_kernels import kernels_in_place, without_kernel
from memfit.ops.kernels.library import custom_op
from memfit.torch_compat.core import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    ExcludeDispatchKeyGuard,
    OpOverload,
    is_functorch_wrapped_tensor,
)

__all__ = ["asking_autograd", "gradients_on_values"]

_aten = torch.ops.aten


@contextmanager
def asking_autograd() -> Iterator[None]:
    """While active, autograd records the calls of a kernel, although the kernel itself runs below autograd."""
    with ExitStack() as around:
        around.enter_context(torch.enable_grad())
        for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
            around.enter_context(ExcludeDispatchKeyGuard(key, False))
        yield


def _gradient_of(forward: OpOverload, name: str, settings: str = "", *, has_data_layout: bool = True) -> OpOverload:
    """Defines the op for the gradient of a forward op.

    Args:
        forward: takes the data and settings.
        name: of the op.
        settings: the schema of the forward op's settings.
        has_data_layout: whether the gradient lies as the data does, and not contiguous, if kernels run on a CPU.
    """

    def kernel(gradient: torch.Tensor, data: torch.Tensor, result: torch.Tensor, *more: Any) -> torch.Tensor:
        leaf = data.detach().requires_grad_()

        def pack(saved: torch.Tensor) -> torch.Tensor | None:
            return saved if saved.data_ptr() == leaf.data_ptr() else None

        def unpack(kept: torch.Tensor | None) -> torch.Tensor:
            return result if kept is None else kept

        # The recomputed result is freed at once: the formula reads the one that is there. Autocast would save a copy
        # of the data, which `pack` would take for the result.
        with torch.autocast(data.device.type, enabled=False), asking_autograd(), saved_tensors_hooks(pack, unpack):
            made = get_gradient_edge(_called(forward, leaf, more))
            (found,) = torch.autograd.grad((made,), leaf, gradient)
        if found.data_ptr() == gradient.data_ptr():  # an op has memory of its own
            found = found.clone()
        strides = fake(gradient, data.to("meta"), result, *more).stride()
        return found if found.stride() == strides else found.new_empty_strided(found.shape, strides).copy_(found)

    def fake(gradient: torch.Tensor, data: torch.Tensor, result: torch.Tensor, *more: Any) -> torch.Tensor:
        as_data = has_data_layout or data.device.type == "cuda"
        return torch.empty_like(data) if as_data else data.new_empty(data.shape)

    schema = f"{name}(Tensor gradient, Tensor data, Tensor result{settings and ', '}{settings}) -> Tensor"
    return custom_op(schema, fake=fake)(kernel)


def _called(forward: OpOverload, data: torch.Tensor, settings: tuple[Any, ...]) -> torch.Tensor:
    """The forward op's result; if the op has a dtype, it is the last setting and is passed by keyword."""
    if forward not in _DTYPED:
        return forward(data, *settings)  # type: ignore[no-any-return]
    *places, dtype = settings
    return forward(data, *places, dtype=dtype)  # type: ignore[no-any-return]


_DTYPED = frozenset((_aten.prod.default, _aten.prod.dim_int, _aten.cumprod.default))

_GRADIENTS = {
    _aten.prod.default: _gradient_of(_aten.prod.default, "prod_gradient", "ScalarType? dtype"),
    _aten.prod.dim_int: _gradient_of(
        _aten.prod.dim_int, "prod_along_gradient", "int dim, bool keepdim, ScalarType? dtype"
    ),
    _aten.cumprod.default: _gradient_of(_aten.cumprod.default, "cumprod_gradient", "int dim, ScalarType? dtype"),
} | {
    forward: _gradient_of(forward, f"{name}_gradient", has_data_layout=False)
    for name, forward in (
        ("max", _aten.max.default),
        ("min", _aten.min.default),
        ("median", _aten.median.default),
        ("nanmedian", _aten.nanmedian.default),
    )
}
"""The gradient op of each forward op."""


class _Recorded(torch.autograd.Function):
    """A forward op that autograd records with its op of `_GRADIENTS`."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, forward: OpOverload, settings: tuple[Any, ...]) -> Any:
        with AutoDispatchBelowAutograd():
            result = _called(forward, data, settings)
        ctx.save_for_backward(data, result)
        ctx.op, ctx.settings = _GRADIENTS[forward], settings
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.op(gradients[0], *ctx.saved_tensors, *ctx.settings), None, None


def gradients_on_values() -> AbstractContextManager[None]:
    """While active, these ops are recorded with gradients that look at values as in eager mode."""
    return kernels_in_place({forward: _recorded(forward) for forward in _GRADIENTS}, DispatchKey.Autograd)


def _recorded(forward: OpOverload) -> Callable[..., torch.Tensor]:
    defaults = [argument.default_value for argument in forward._schema.arguments[1:] if argument.name != "dtype"]

    def recorded(data: torch.Tensor, *places: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        if is_functorch_wrapped_tensor(data):  # transforms of torch.func have rules for the op itself
            with without_kernel(forward, DispatchKey.Autograd):
                return _called(forward, data, (*places, dtype) if forward in _DTYPED else places)
        settings = (*places, *defaults[len(places) :])
        if forward in _DTYPED:
            settings = (*settings, dtype)
        made: torch.Tensor = _Recorded.apply(data, forward, settings)
        return made

    return recorded
