"""Tiles of images: their positions, the ranges that windows read, padding and cropping.

A tile is a range along each axis of space that is cut; a window is the window of a convolution or a pooling along one
axis.

Window arithmetic: Dumoulin & Visin, "A guide to convolution arithmetic for deep learning" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "SPACE",
    "Range",
    "Tile",
    "Window",
    "bands_of",
    "cropped",
    "inside",
    "narrowed",
    "padded",
    "read_by",
    "tiles_of",
    "touching",
]

_aten = torch.ops.aten

SPACE = 2
"""The first axis of space; batch and channels come before it."""

Range = tuple[int, int]
"""Start, included, and stop, excluded."""

Tile = tuple[Range, ...]
"""The range along each axis of space that is cut."""


def bands_of(extent: int, bands: int) -> list[Range]:
    """The bands into which an axis is cut."""
    return [(band * extent // bands, (band + 1) * extent // bands) for band in range(bands)]


def tiles_of(extents: Sequence[int], grid: Sequence[int]) -> list[Tile]:
    """The tiles of a grid, the last axis innermost."""
    tiles: list[Tile] = [()]
    for extent, bands in zip(extents, grid, strict=True):
        tiles = [(*tile, band) for tile in tiles for band in bands_of(extent, bands)]
    return tiles


def narrowed(tensor: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A tile of a tensor, as a view."""
    for axis, (start, stop) in enumerate(tile, SPACE):
        tensor = tensor.narrow(axis, start, stop - start)
    return tensor


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a convolution or a pooling along one axis."""

    size: int
    stride: int
    padding: int

    def read(self, start: int, stop: int) -> Range:
        """The range that the windows from `start` to before `stop` cover, including padding at the border."""
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.size

    def touching(self, start: int, stop: int, windows: int) -> Range:
        """The windows that cover anything from `start` to before `stop`, at least one."""
        first = -((self.size - 1 - start - self.padding) // self.stride)
        return _clipped((first, (stop - 1 + self.padding) // self.stride + 1), windows)


def read_by(windows: Sequence[Window], tile: Tile) -> Tile:
    """The ranges that the windows of a tile cover, including padding at the border."""
    return tuple(window.read(*here) for window, here in zip(windows, tile, strict=True))


def touching(windows: Sequence[Window], tile: Tile, extents: Sequence[int]) -> Tile:
    """The windows that cover anything of a tile; `extents` are the numbers of windows along each axis."""
    return tuple(window.touching(*here, most) for window, here, most in zip(windows, tile, extents, strict=True))


def _clipped(here: Range, extent: int) -> Range:
    """The part of a range that lies within the extent, at least one element."""
    start = min(max(here[0], 0), extent - 1)
    return start, max(start + 1, min(here[1], extent))


def inside(tile: Tile, extents: Sequence[int]) -> Tile:
    """The part of a tile that lies within the borders."""
    return tuple(_clipped(here, extent) for here, extent in zip(tile, extents, strict=True))


def padded(tensor: torch.Tensor, tile: Tile, extents: Sequence[int], value: float = 0.0) -> torch.Tensor:
    """A tile with padding beyond the border, given its part within the border (`inside`)."""
    beyond = [(max(0, -start), max(0, stop - extent)) for (start, stop), extent in zip(tile, extents, strict=True)]
    if not any(map(any, beyond)):
        return tensor
    pads = [*(0, 0) * (tensor.dim() - SPACE - len(tile)), *(n for pair in reversed(beyond) for n in pair)]
    made = _aten.constant_pad_nd.default(tensor, pads, value)
    sizes = [stop - start for start, stop in tile]
    starts = [0 if before else made.shape[SPACE + i] - sizes[i] for i, (before, _) in enumerate(beyond)]
    return narrowed(made, tuple((start, start + size) for start, size in zip(starts, sizes, strict=True)))


def cropped(made: torch.Tensor, first: Sequence[int], tile: Tile, fill: torch.Tensor | None = None) -> torch.Tensor:
    """The tile cut out of `made`, which starts at `first`; elements outside `made` are zero, or `fill` by channel."""
    there = [
        (max(start, origin), min(stop, origin + made.shape[SPACE + i]))
        for i, ((start, stop), origin) in enumerate(zip(tile, first, strict=True))
    ]
    taken = narrowed(made, tuple((a - o, max(a, b) - o) for (a, b), o in zip(there, first, strict=True)))
    if tuple(there) == tile:
        return taken
    sizes = [stop - start for start, stop in tile]
    whole = made.new_zeros((*made.shape[:SPACE], *sizes, *made.shape[SPACE + len(tile) :]))
    if fill is not None:
        whole.copy_(fill.view(1, -1, *(1,) * (made.dim() - 2)))
    if all(a < b for a, b in there):
        inner = tuple((a - start, b - start) for (a, b), (start, _) in zip(there, tile, strict=True))
        narrowed(whole, inner).copy_(taken)
    return whole
