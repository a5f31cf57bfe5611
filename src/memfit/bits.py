"""Whether two tensors hold the same bits."""

from __future__ import annotations

import math

import torch

__all__ = ["max_difference", "same_bits"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; unlike `==`, NaN equals NaN and 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return same_bits(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    if a.layout is not torch.strided or a.is_quantized:
        return torch.equal(a, b)
    return torch.equal(_bytes(a), _bytes(b))


def max_difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Largest absolute difference of two tensors; infinite where one is missing or has another shape."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to_dense().to(wide) - b.to_dense().to(wide)).abs().max()) if a.numel() else 0.0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element has any stride, also when contiguous
