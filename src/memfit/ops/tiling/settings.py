"""Settings of ops with windows, for the axes that are cut, and metadata-only tensors in the size of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memfit.ops.kernels.convolution import make_metadata_only
from memfit.ops.tiling.window import SPACE, Tile, Window
from memfit.torch_compat.core import suggest_memory_format

__all__ = ["metadata_only_tile", "settings_of", "windows_along", "windows_of"]


def windows_of(weight: fx.Node, stride: Any, padding: Any, dilation: Any, axes: int) -> Sequence[Window]:
    """The windows of a convolution along the axes that are cut."""
    return windows_along(weight.meta["val"].shape[SPACE:], stride, padding, dilation, axes)


def windows_along(kernel: Any, stride: Any, padding: Any, dilation: Any, axes: int) -> Sequence[Window]:
    """Windows along the axes that are cut, from settings that are one number or one number per axis."""
    given = [[v] * axes if isinstance(v, int) else list(v) for v in (kernel, stride, padding, dilation)]
    return tuple(
        Window(size=wide * (size - 1) + 1, stride=step, padding=pad)
        for size, step, pad, wide, _ in zip(*given, range(axes), strict=False)
    )


def settings_of(given: Sequence[Any], data: fx.Node, defaults: Sequence[Any]) -> list[Any]:
    """The settings of a pooling: kernel, stride and padding one per axis, the rest as given."""
    axes = data.meta["val"].dim() - SPACE
    settings = [*given, *defaults[len(given) - 1 :]] if defaults else list(given)
    kernel, stride, padding, *rest = settings
    sizes, pads, steps = (_for_axes(v, axes) for v in (kernel, padding, stride or kernel))
    return [sizes, steps, pads, *rest]


def _for_axes(value: Any, axes: int) -> list[int]:
    return [value] * axes if isinstance(value, int) else list(value) * (axes // len(value))


def metadata_only_tile(metadata_only: torch.Tensor, samples: int, tile: Tile) -> torch.Tensor:
    """A metadata-only tensor with the size of a tile of `samples` samples, in the layout of the whole."""
    sizes = [stop - start for start, stop in tile]
    shape = (samples, metadata_only.shape[1], *sizes, *metadata_only.shape[SPACE + len(tile) :])
    layout = suggest_memory_format(metadata_only)
    return make_metadata_only(
        torch.empty(shape, dtype=metadata_only.dtype, device="meta", memory_format=layout), metadata_only.device
    )
