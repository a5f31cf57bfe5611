"""Gives tensors that are filled at random in place the same numbers in a graph as in eager mode.

A functional graph has no `bernoulli_`: it has `bernoulli`, whose result is contiguous whatever the layout of its
operand, so the numbers of a generator go to other elements where the operand is channels last. For each such op and
layout memfit tests, on a real tensor of the same layout, whether the functional op draws the same numbers for the same
elements, and if not, whether it does so on a view with the axes in memory order. If neither is the case, no graph has
eager's bits.

A call whose result is not read (dropout in a dead branch of the last layer) draws its numbers in eager mode too, and
later calls get the next numbers of the generator, so such calls stay in the graph.

*Idea*: ours; the ops are found by their tags and schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch

from memfit.capture.eager.kernel_samples import is_dense_layout, real_like, sizes_to_try
from memfit.capture.eager.python_kernels import kernels_in_place
from memfit.errors import CaptureError
from memfit.torch_compat.compiler import inductor_config
from memfit.torch_compat.core import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    OpOverload,
    disable_current_modes,
    no_dispatch,
    no_python_dispatcher,
    pytree,
)

__all__ = ["draws_kept", "filled_as_in_eager"]


def filled_as_in_eager() -> AbstractContextManager[None]:
    """While active, calls that fill a tensor at random in place are traced so that the tensor gets eager's numbers."""
    fills = [op for op in _random_fills() if DispatchKey.Autograd not in op.py_kernels]
    return kernels_in_place({op: _traced(op) for op in fills}, DispatchKey.Autograd)


def draws_kept() -> AbstractContextManager[None]:
    """While active, calls that draw random numbers stay in a graph even if their results are not read.

    AOTAutograd drops them as dead code unless Inductor is told to draw the numbers that eager mode draws.
    """
    return cast(AbstractContextManager[None], inductor_config.patch(fallback_random=True))


def _random_fills() -> list[OpOverload]:
    names = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads() if overload != "out"]


def _traced(op: OpOverload) -> Callable[..., Any]:
    def traced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with no_python_dispatcher():
            if tensor.is_contiguous() or tensor.numel() < 2:
                op(tensor, *args, **kwargs)
            else:
                _fill(op, tensor, args, kwargs)
        return tensor

    return traced


def _fill(op: OpOverload, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    in_memory = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    numbers_only = not any(isinstance(a, torch.Tensor) for a in pytree.tree_leaves((args, kwargs)))
    if _draws_alike(op, tensor, args, kwargs, tuple(range(tensor.dim()))):
        op(tensor, *args, **kwargs)
    elif numbers_only and _draws_alike(op, tensor, args, kwargs, tuple(in_memory)):
        op(tensor.permute(in_memory), *args, **kwargs)
    else:
        raise CaptureError(
            f"{op._schema.name.removeprefix('aten::')} fills a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tuple(tensor.stride())} in place with other random numbers than its traced form does; "
            "fill a contiguous tensor and copy it"
        )


def _draws_alike(
    op: OpOverload, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Sequence[int]
) -> bool:
    """Whether the functional op, on a view with the axes in this order, draws the same numbers as the in-place op."""
    told = op._schema.arguments[1 + len(args) :]
    defaults = (a.default_value for a in told if not a.kwarg_only and a.name not in kwargs)  # the other op has none
    arguments, spec = pytree.tree_flatten(((*args, *defaults), dict(kwargs)))
    sizes = next(sizes_to_try([tensor]))
    with ExitStack() as aside:
        aside.enter_context(disable_current_modes())
        for context in (no_dispatch(), AutoDispatchBelowAutograd()):
            aside.enter_context(context)
        devices = [] if tensor.device.type != "cuda" else [tensor.device.index or 0]
        aside.enter_context(torch.random.fork_rng(devices=devices))
        ours = [_argument(a, sizes) for a in arguments]
        args, kwargs = pytree.tree_unflatten(ours, spec)
        found = []
        for place in (axes, None):
            torch.manual_seed(0)
            filled = real_like(tensor, sizes, 0)
            if place is None:
                op(filled, *args, **kwargs)
            else:
                drawn = _functional(op)(filled.permute(*place), *args, **kwargs)
                if drawn.stride() != filled.permute(*place).stride() and is_dense_layout(filled.shape, filled.stride()):
                    return False
                filled = filled.permute(*place).copy_(drawn).permute(*_inverse(place))
            found.append(filled)
        return torch.equal(*found)


def _argument(argument: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(argument, torch.Tensor):
        return real_like(argument, sizes, 1)
    return None if isinstance(argument, torch.Generator) else argument


def _functional(op: OpOverload) -> Callable[..., torch.Tensor]:
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, "normal_functional" if name == "normal" else name)
    overload = "p" if (name, op._overloadname) == ("bernoulli", "float") else op._overloadname
    return getattr(packet, overload)  # type: ignore[no-any-return]


def _inverse(axes: Sequence[int]) -> list[int]:
    return sorted(range(len(axes)), key=axes.__getitem__)
