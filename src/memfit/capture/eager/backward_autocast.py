"""Autocast in backward passes: off, as in loops that call `backward` outside of the region, or on.

PyTorch advises to leave an autocast region before `backward`, and trainers do (accelerate, Lightning). Then each
gradient is computed in the dtype of its forward op. AOTAutograd traces the backward pass under the autocast that is on
when it traces, so the gradient of a product that a forward pass makes in float32, in a region with autocast off, comes
in half precision; on a CUDA device gradients of biases are summed in float32. Both are other bits than the loop's.

So backward passes are traced and proved with autocast off. A backward pass that is run inside a region is noticed where
it runs (`memfit.runtime.forward_passes`), and the next call is planned with autocast on in it.

Known limits: the dtype of the region around `backward` is taken to be that of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
import torch._functorch.config

__all__ = ["autocast_is_on", "backward_in_autocast", "backward_region", "planning_backward", "traced_backward"]

_INSIDE: ContextVar[bool] = ContextVar("memfit_backward_in_autocast", default=False)


def backward_in_autocast() -> bool:
    """Whether what is planned or compiled now has its backward pass inside the region of its forward pass."""
    return _INSIDE.get()


@contextmanager
def planning_backward(*, in_autocast: bool) -> Iterator[None]:
    """While active, backward passes are planned, proved and compiled inside the region, or outside."""
    token = _INSIDE.set(in_autocast)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def autocast_is_on() -> bool:
    """Whether a region is active, for any device."""
    return bool(torch._C._is_any_autocast_enabled())


@contextmanager
def backward_region() -> Iterator[None]:
    """Where to run a backward pass on trial: outside of every region, unless it is planned inside."""
    with ExitStack() as around:
        if autocast_is_on() and not _INSIDE.get():
            for kind in torch._C._autocast_supported_devices():
                if hasattr(torch, kind) and torch.is_autocast_enabled(kind):
                    around.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def traced_backward() -> Iterator[None]:
    """While active, AOTAutograd traces backward passes so."""
    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward" if _INSIDE.get() else "off"):
        yield
