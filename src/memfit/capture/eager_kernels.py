"""Keeps calls whole that AOTAutograd would take apart on its way to a graph, where the parts round otherwise.

memfit asks for no decompositions, but some are part of the ops themselves: under the Python dispatcher, resizing of
images runs as index arithmetic, gathers and sums, and a few losses and activations as formulas. Eager PyTorch runs a
kernel with other bits, and less memory. While a graph is made these Python kernels are put aside, so that what autograd
records is the kernel and its own backward kernel. Results are laid out as kernels do (`memfit.capture.kernel_strides`).

Known limits: the ops are the process's, so other graphs that are made meanwhile, in another thread, are whole too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

from memfit.capture.eager_dropout import draws_laid_out
from memfit.capture.kernel_strides import strides_of_kernels

__all__ = ["as_in_eager"]

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

_NAMES = (
    *(f"upsample_{way}" for way in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")),
    *(f"_upsample_{way}" for way in ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d")),
    *(f"_upsample_{way}2d_aa" for way in ("bilinear", "bicubic", "lanczos")),
    "dropout",
    *("upsample_trilinear3d", "hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward"),
)


@contextmanager
def as_in_eager() -> Iterator[None]:
    """While active, calls are traced as the kernels that eager PyTorch runs."""
    aside = [
        (overload, key, overload.py_kernels.pop(key))
        for name in _NAMES
        for overload in _overloads(name)
        for key in _KEYS
        if key in overload.py_kernels
    ]
    for overload, _, _ in aside:
        overload._dispatch_cache.clear()
    try:
        with strides_of_kernels(), draws_laid_out():
            yield
    finally:
        for overload, key, kernel in aside:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name, None)  # some are newer than others
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
