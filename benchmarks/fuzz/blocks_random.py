"""Randomness: every dropout, draws of every distribution, generators of the module, Python's and NumPy's."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import ANY, IMAGE, SEQUENCE, VOLUME, Apply, Shape, block

RATES = (0.04, 0.1, 0.2, 0.3, 0.45, 0.5, 0.71)
BY_CHANNEL = {SEQUENCE: nn.Dropout1d, IMAGE: nn.Dropout2d, VOLUME: nn.Dropout3d}
BY_CHANNEL_FUNCTION = {SEQUENCE: F.dropout1d, IMAGE: F.dropout2d, VOLUME: F.dropout3d}


@block(*ANY)
def dropout(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice([nn.Dropout, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout])
    inner = kind(rng.choice(RATES), inplace=rng.random() < 0.3)
    return Apply(lambda self, x: self.inner(x * 1.0), inner=inner)


@block(SEQUENCE, IMAGE, VOLUME)
def dropout_of_channels(rng: random.Random, shape: Shape) -> nn.Module | None:
    rate = rng.choice(RATES)
    if rng.random() < 0.5:
        return BY_CHANNEL[len(shape)](rate)
    return Apply(lambda self, x: BY_CHANNEL_FUNCTION[len(shape)](x, rate, training=self.training))


@block(*ANY)
def dropout_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind, rate = rng.choice(["one", "two", "in place", "alpha", "feature alpha"]), rng.choice(RATES)

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "one":
                return F.dropout(x, rate, training=self.training)
            case "two":
                return F.dropout(x, rate) + F.dropout(x, 0.3)
            case "in place":
                return F.dropout(x * 1.0, rate, inplace=True)
            case "alpha":
                return F.alpha_dropout(x, rate, training=True)
        return F.feature_alpha_dropout(x, rate, training=True)

    return Apply(function, f"{kind} {rate}")


@block(*ANY)
def drawn(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(
        ["rand_like", "bernoulli", "bernoulli of values", "randn_like", "normal_", "uniform_", "randint", "poisson",
         "exponential_", "rand", "normal", "bernoulli_", "geometric_", "log_normal_", "multinomial", "cauchy_"]
    )  # fmt: skip

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "rand_like":
                return x * torch.rand_like(x)
            case "bernoulli":
                return x * torch.bernoulli(torch.full_like(x, 0.7))
            case "bernoulli of values":
                return x * torch.bernoulli(torch.sigmoid(x.detach()))
            case "randn_like":
                return x + 0.1 * torch.randn_like(x)
            case "normal_":
                return x + torch.empty_like(x).normal_(0, 0.1)
            case "uniform_":
                return x + torch.empty(x.shape, dtype=x.dtype, device=x.device).uniform_(-0.1, 0.1)
            case "randint":
                return x * torch.randint(0, 2, x.shape, device=x.device)
            case "poisson":
                return x + torch.poisson(x.detach().abs())
            case "exponential_":
                return x * torch.empty_like(x).exponential_(2.0)
            case "normal":
                return x + torch.normal(x.detach(), 0.1) * 0.1
            case "bernoulli_":
                return x * torch.empty_like(x).bernoulli_(0.6)
            case "geometric_":
                return x + torch.empty_like(x).geometric_(0.5) * 0.1
            case "log_normal_":
                return x + torch.empty_like(x).log_normal_(0, 0.3) * 0.1
            case "multinomial":
                rows = torch.softmax(x.detach().flatten(1).float(), -1)
                return x + torch.multinomial(rows, 1).sum().to(x.dtype) * 1e-3
            case "cauchy_":
                return x + torch.empty_like(x).cauchy_().clamp(-2, 2) * 0.1
        return (
            x + torch.rand(x.shape[-1], dtype=x.dtype, device=x.device) + torch.randn(1, dtype=x.dtype, device=x.device)
        )

    return Apply(function, kind)


@block(*ANY)
def drawn_by_own_generator(rng: random.Random, shape: Shape) -> nn.Module | None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(rng.randrange(1000))

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype, device=x.device)

    return Apply(function, generator=generator)


@block(*ANY)
def drawn_outside_torch(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["python", "numpy"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        return x * (random.random() + 0.5 if kind == "python" else float(np.random.rand()) + 0.5)

    return Apply(function, kind)


@block(SEQUENCE)
def permuted(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(lambda self, x: x[:, torch.randperm(x.shape[1], device=x.device)])


@block(IMAGE, SEQUENCE)
def stochastic_depth(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A residual branch that is left out: for some samples, or as a whole by a coin of Python's."""
    kind = rng.choice(["samples", "branch"])
    inner = nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.GELU())

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "branch":
            return x + self.inner(x) if random.random() < 0.5 else x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.8).div_(0.8)
        return x + self.inner(x) * kept

    return Apply(function, kind, inner=inner)


@block(SEQUENCE)
def layers_dropped(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Layers that torch's generator leaves out, read as a number."""
    inner = nn.ModuleList(nn.Linear(shape[-1], shape[-1]) for _ in range(3))

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            if torch.rand([]).item() < 0.7:
                x = x + layer(x).tanh()
        return x

    return Apply(function, inner=inner)
