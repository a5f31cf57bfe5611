"""Autocast state of backward passes: off, as in loops that call `backward` outside of the autocast region, or on.

PyTorch advises leaving an autocast region before `backward`, and trainers do so (accelerate, Lightning). Then each
gradient is computed in the dtype of its forward op. AOTAutograd traces the backward pass under the autocast state at
trace time. So a product that the forward pass computes in float32, in a region with autocast off, gets its gradient in
half precision; and on a CUDA device, gradients of biases are summed in float32. In both cases the bits differ from the
loop's.

So backward passes are traced and proved with autocast off. A backward pass that runs inside a region is detected when
it runs (`memfit.runtime.loop.forward_passes`), and the next call is planned with autocast on in the backward pass.

Known limits: the dtype of the region around `backward` is assumed to be the dtype of the forward pass's region.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch

from memfit.torch_compat.core import autocast_devices, autocast_is_on, functorch_config

__all__ = ["backward_in_autocast", "backward_region", "planning_backward", "traced_backward"]

_INSIDE: ContextVar[bool] = ContextVar("memfit_backward_in_autocast", default=False)


def backward_in_autocast() -> bool:
    """Whether the step that is planned or compiled now runs its backward pass inside the region of its forward pass."""
    return _INSIDE.get()


@contextmanager
def planning_backward(*, in_autocast: bool) -> Iterator[None]:
    """While active, backward passes are planned, proved and compiled inside the autocast region, or outside of it."""
    token = _INSIDE.set(in_autocast)
    try:
        yield
    finally:
        _INSIDE.reset(token)


@contextmanager
def backward_region() -> Iterator[None]:
    """Context of a trial backward pass: outside of every autocast region, unless the pass is planned inside."""
    with ExitStack() as around:
        if autocast_is_on() and not _INSIDE.get():
            for kind in autocast_devices():
                if hasattr(torch, kind) and torch.is_autocast_enabled(kind):
                    around.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def traced_backward() -> Iterator[None]:
    """While active, AOTAutograd traces backward passes with the planned autocast state."""
    with functorch_config.patch(backward_pass_autocast="same_as_forward" if _INSIDE.get() else "off"):
        yield
