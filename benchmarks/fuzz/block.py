"""A block: a small module made at random for inputs of a given shape, the unit of which random models are built.

Blocks map a batch to a batch and know what they fit by the number of dimensions: 2 for vectors (N, F), 3 for sequences
(N, T, D), which are also signals (N, C, L), 4 for images (N, C, H, W), 5 for volumes (N, C, D, H, W).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ANY", "IMAGE", "SEQUENCE", "VECTOR", "VOLUME", "Apply", "Block", "Make", "Shape", "block", "weight"]

VECTOR, SEQUENCE, IMAGE, VOLUME = 2, 3, 4, 5
ANY = (VECTOR, SEQUENCE, IMAGE, VOLUME)

Shape = tuple[int, ...]
Make = Callable[[random.Random, Shape], "nn.Module | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of block.

    Attributes:
        name: the factory's.
        family: the file it stands in, without `blocks_`.
        dims: numbers of dimensions of inputs it may get.
        make: from randomness and a shape to a module, None where the shape does not fit.
    """

    name: str
    family: str
    dims: tuple[int, ...]
    make: Make


def block(*dims: int) -> Callable[[Make], Block]:
    """Makes a factory a block for inputs of these numbers of dimensions."""

    def of(make: Make) -> Block:
        family = make.__module__.rpartition(".")[2].removeprefix("blocks_")
        return Block(name=make.__name__.rstrip("_"), family=family, dims=dims, make=make)

    return of


class Apply(nn.Module):
    """A function of itself and the input as a module; tensors, modules and plain values become its members."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], kind: str = "", **members: Any) -> None:
        super().__init__()
        self.function, self.kind = function, kind
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)

    def extra_repr(self) -> str:
        return self.kind


def weight(*shape: int, scale: float = 1.0) -> nn.Parameter:
    """A parameter of normal numbers."""
    return nn.Parameter(torch.randn(*shape) * scale)
