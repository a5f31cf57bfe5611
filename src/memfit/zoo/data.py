"""Real data that is already installed: two photographs of scikit-learn and the text of the standard library.

Random inputs cannot show that a fitted model still learns. These streams can, without a download: crops of two
photographs, to be classified, and bytes of English text, to be continued.

Known limits: the text differs between Python versions, so losses are comparable only under one version; the photographs
are 427×640 pixels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from memfit.errors import SpecError
from memfit.zoo.lazy import require

__all__ = ["photo_crops", "standard_library_text", "text_windows", "whole_photographs"]

_TEXTS = ("pydoc_data.topics", "this")


def photo_crops(*, batch: int, size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of random crops of scikit-learn's two sample photographs, a temple and a flower.

    Args:
        batch: number of crops in a batch.
        size: height and width of a crop in pixels, at most 427.
        seed: seed of places and labels.

    Yields:
        Crops, float32 [batch, 3, size, size], each channel normalised over both photographs to mean 0 and standard
        deviation 1, and the index of the photograph of each crop, int64 [batch].

    Raises:
        SpecError: if scikit-learn is missing, or the crops are larger than the photographs.
    """
    photos = _photographs()
    height, width = photos.shape[2:]
    if not 1 <= size <= min(height, width):
        raise SpecError(f"the photographs are {height}×{width} pixels; take crops from 1 to {height} (size: {size})")
    return _crops(photos, batch, size, torch.Generator().manual_seed(seed))


def whole_photographs(*, multiple: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scikit-learn's two sample photographs, in their own size or scaled.

    Args:
        multiple: height and width are cut at the border to multiples of this number.
        scale: factor by which both photographs are scaled, bilinearly.

    Returns:
        Photographs, float32 [2, 3, height, width], normalised like the crops, and their labels, one-hot [2, 2].

    Raises:
        SpecError: if scikit-learn is missing.
    """
    photos = _photographs()
    if scale != 1:
        photos = torch.nn.functional.interpolate(photos, scale_factor=scale, mode="bilinear", align_corners=False)
    height, width = (n // multiple * multiple for n in photos.shape[2:])
    return photos[:, :, :height, :width].contiguous(), torch.eye(2)


def text_windows(*, batch: int, length: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of windows of English text, byte by byte; the vocabulary is 256.

    Args:
        batch: number of windows in a batch.
        length: number of bytes in a window.
        seed: seed of their places.

    Yields:
        Bytes, int64 [batch, length], and the byte after each byte, int64 [batch, length].

    Raises:
        SpecError: if the window is longer than the text.
    """
    text = standard_library_text()
    if not 1 <= length < len(text):
        raise SpecError(f"the text has {len(text)} bytes; take windows from 1 to {len(text) - 1} (length: {length})")
    return _windows(text, batch, length, torch.Generator().manual_seed(seed))


@cache
def standard_library_text() -> Tensor:
    """The sources of Python's help topics and of `this`, uint8 [bytes], about 700 thousand bytes.

    Raises:
        SpecError: if this Python was installed without its sources.
    """
    sources = []
    for module in _TEXTS:
        spec = importlib.util.find_spec(module)
        source = getattr(spec.loader, "get_source", lambda name: None)(module) if spec else None
        if source is None:
            raise SpecError(f"this Python has no source of {module}; use one with the whole standard library")
        sources.append(source)
    return torch.tensor(list("\n".join(sources).encode()), dtype=torch.uint8)


def _windows(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1].clone(), window[:, 1:].clone()


@cache
def _photographs() -> Tensor:
    """Both photographs, normalised, float32 [2, 3, 427, 640]."""
    datasets = require("sklearn.datasets", extra="demo")
    try:
        images = datasets.load_sample_images().images
    except ImportError as error:
        raise SpecError(f"cannot read the photographs ({error}); install: pip install 'memfit[demo]'") from error
    photos = torch.stack([torch.from_numpy(image.copy()) for image in images]).permute(0, 3, 1, 2).float()
    mean, deviation = photos.mean((0, 2, 3), keepdim=True), photos.std((0, 2, 3), keepdim=True)
    return ((photos - mean) / deviation).contiguous()


def _crops(photos: Tensor, batch: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    height, width = photos.shape[2:]
    while True:
        labels = torch.randint(len(photos), (batch,), generator=generator)
        tops = torch.randint(height - size + 1, (batch,), generator=generator).tolist()
        lefts = torch.randint(width - size + 1, (batch,), generator=generator).tolist()
        places = zip(labels.tolist(), tops, lefts, strict=True)
        yield torch.stack([photos[i, :, y : y + size, x : x + size] for i, y, x in places]), labels
