"""Convolutions: along one, two and three axes, transposed, grouped, dilated, padded in every mode, of made weights."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import IMAGE, SEQUENCE, VOLUME, Apply, Shape, block, weight

CONVOLUTIONS = {SEQUENCE: nn.Conv1d, IMAGE: nn.Conv2d, VOLUME: nn.Conv3d}
TRANSPOSED = {SEQUENCE: nn.ConvTranspose1d, IMAGE: nn.ConvTranspose2d, VOLUME: nn.ConvTranspose3d}


@block(SEQUENCE, IMAGE, VOLUME)
def convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    inputs, least = shape[1], min(shape[2:])
    outputs = rng.choice([inputs, 6, 8])
    kernel = rng.choice([1, 3] if len(shape) == VOLUME else [1, 3, 5])
    mode = rng.choice(["zeros", "zeros", "reflect", "circular", "replicate"]) if least > kernel else "zeros"
    return CONVOLUTIONS[len(shape)](
        inputs,
        outputs,
        kernel,
        stride=rng.choice([1, 1, 2]) if least >= 8 else 1,
        padding=kernel // 2,
        groups=rng.choice([1, 1, math.gcd(inputs, outputs)]),
        bias=rng.random() < 0.6,
        padding_mode=mode,
    )


@block(SEQUENCE, IMAGE)
def dilated_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    return CONVOLUTIONS[len(shape)](shape[1], shape[1], 3, padding=rng.choice([2, "same"]), dilation=2)


@block(SEQUENCE, IMAGE, VOLUME)
def transposed_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    stride = rng.choice([1, 2]) if max(shape[2:]) <= 8 else 1
    return TRANSPOSED[len(shape)](
        shape[1],
        rng.choice([4, 6]),
        3,
        stride=stride,
        padding=1,
        output_padding=stride - 1,
        groups=rng.choice([1, 2]) if shape[1] % 2 == 0 else 1,
        bias=rng.random() < 0.7,
    )


@block(IMAGE)
def convolution_norm_activation(rng: random.Random, shape: Shape) -> nn.Module | None:
    channels = shape[1]
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(rng.random() < 0.5)
    )


@block(IMAGE)
def inverted_residual(rng: random.Random, shape: Shape) -> nn.Module | None:
    c = shape[1]
    inner = nn.Sequential(
        nn.Conv2d(c, 3 * c, 1, bias=False), nn.BatchNorm2d(3 * c), nn.ReLU6(inplace=True),
        nn.Conv2d(3 * c, 3 * c, 3, padding=1, groups=3 * c, bias=False), nn.BatchNorm2d(3 * c), nn.Hardswish(),
        nn.Conv2d(3 * c, c, 1, bias=False), nn.BatchNorm2d(c),
    )  # fmt: skip
    return Apply(lambda self, x: x + self.inner(x), inner=inner)


@block(SEQUENCE)
def convolution_over_tokens(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(
        lambda self, x: self.inner(x.transpose(1, 2)).transpose(1, 2),
        inner=nn.Conv1d(shape[2], shape[2], 3, padding=1, groups=rng.choice([1, shape[2]])),
    )


@block(SEQUENCE)
def causal_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    inner = nn.Conv1d(shape[2], shape[2], 4, padding=3, groups=shape[2])
    return Apply(lambda self, x: F.silu(self.inner(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2), inner=inner)


@block(SEQUENCE)
def convolution_time_first(rng: random.Random, shape: Shape) -> nn.Module | None:
    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        return F.conv_tbc(x.transpose(0, 1).contiguous(), self.weight, self.bias, 1).transpose(0, 1)

    return Apply(function, weight=weight(3, shape[2], 8, scale=0.2), bias=weight(8))


@block(IMAGE)
def convolution_of_made_weight(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A filter for each sample, made of the sample: one grouped convolution over the whole batch."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        filters = self.make(x.mean((2, 3))).view(n * c, 1, 3, 3)
        return F.conv2d(x.reshape(1, n * c, h, w), filters, padding=1, groups=n * c).view(n, c, h, w)

    return Apply(function, make=nn.Linear(shape[1], 9 * shape[1]))


@block(IMAGE)
def standardised_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        deviation, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (deviation + 1e-5), padding=1)

    return Apply(function, weight=weight(shape[1], shape[1], 3, 3))


@block(IMAGE)
def convolution_in_channels_last(rng: random.Random, shape: Shape) -> nn.Module | None:
    inner = nn.Conv2d(shape[1], shape[1], 3, padding=1).to(memory_format=torch.channels_last)
    return Apply(lambda self, x: self.inner(x.contiguous(memory_format=torch.channels_last)), inner=inner)


@block(SEQUENCE)
def convolution_of_one_image(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Three dimensions without a batch: the functions take that too."""
    return nn.Conv2d(shape[0], shape[0], 3, padding=1)


@block(IMAGE)
def convolution_beside_its_input(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A dense connection: what was read is concatenated with what was made."""
    if shape[1] > 24:
        return None
    inner = nn.Sequential(nn.BatchNorm2d(shape[1]), nn.ReLU(inplace=True), nn.Conv2d(shape[1], 4, 3, padding=1))
    return Apply(lambda self, x: torch.cat([x, self.inner(x)], 1), inner=inner)
