"""Weights that are computed: weight and spectral norm, orthogonal ones, pruned ones, parametrisations of one's own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.fuzz.block import IMAGE, SEQUENCE, VECTOR, Shape, block


class Symmetric(nn.Module):
    """A parametrisation of one's own."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def layer(shape: Shape) -> nn.Module:
    """A layer with a square weight."""
    if len(shape) == IMAGE:
        return nn.Conv2d(shape[1], shape[1], 3, padding=1)
    return nn.Linear(shape[-1], shape[-1])


def old(of: Callable[..., nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """A way that torch has in favour of another, and that models still go."""

    def applied(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return of(module)

    return applied


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old weight norm": old(nn.utils.weight_norm),
    "old spectral norm": old(nn.utils.spectral_norm),
}


@block(VECTOR, SEQUENCE, IMAGE)
def normed_weight(rng: random.Random, shape: Shape) -> nn.Module | None:
    return NORMS[rng.choice(sorted(NORMS))](layer(shape))


@block(VECTOR, SEQUENCE)
def orthogonal(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] > 24:
        return None
    kind = rng.choice(["matrix_exp", "cayley", "householder"])
    return parametrizations.orthogonal(nn.Linear(shape[-1], shape[-1]), orthogonal_map=kind)


@block(VECTOR, SEQUENCE)
def own_parametrization(rng: random.Random, shape: Shape) -> nn.Module | None:
    inner = nn.Linear(shape[-1], shape[-1])
    parametrize.register_parametrization(inner, "weight", Symmetric())
    return inner


@block(VECTOR, SEQUENCE, IMAGE)
def pruned(rng: random.Random, shape: Shape) -> nn.Module | None:
    inner = layer(shape)
    prune.l1_unstructured(inner, "weight", 0.3)
    return inner
