"""Pooling: maximum, average, power, adaptive, fractional, global, with indices and back again."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import IMAGE, SEQUENCE, VOLUME, Apply, Shape, block

MAXIMUM = {SEQUENCE: nn.MaxPool1d, IMAGE: nn.MaxPool2d, VOLUME: nn.MaxPool3d}
AVERAGE = {SEQUENCE: nn.AvgPool1d, IMAGE: nn.AvgPool2d, VOLUME: nn.AvgPool3d}
POWER = {SEQUENCE: nn.LPPool1d, IMAGE: nn.LPPool2d, VOLUME: nn.LPPool3d}
ADAPTIVE_AVERAGE = {SEQUENCE: nn.AdaptiveAvgPool1d, IMAGE: nn.AdaptiveAvgPool2d, VOLUME: nn.AdaptiveAvgPool3d}
ADAPTIVE_MAXIMUM = {SEQUENCE: nn.AdaptiveMaxPool1d, IMAGE: nn.AdaptiveMaxPool2d, VOLUME: nn.AdaptiveMaxPool3d}
FRACTIONAL = {IMAGE: nn.FractionalMaxPool2d, VOLUME: nn.FractionalMaxPool3d}
UNPOOL = {SEQUENCE: nn.MaxUnpool1d, IMAGE: nn.MaxUnpool2d, VOLUME: nn.MaxUnpool3d}
BY_NAME = {SEQUENCE: F.max_pool1d, IMAGE: F.max_pool2d, VOLUME: F.max_pool3d}


@block(SEQUENCE, IMAGE, VOLUME)
def max_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    if min(shape[2:]) < 4:
        return None
    kernel = rng.choice([2, 3])
    return MAXIMUM[len(shape)](
        kernel,
        stride=rng.choice([1, 2]),
        padding=rng.choice([0, 1]),
        dilation=rng.choice([1, 1, 2]),
        ceil_mode=rng.random() < 0.3,
    )


@block(SEQUENCE, IMAGE, VOLUME)
def average_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    if min(shape[2:]) < 4:
        return None
    more = {"divisor_override": 5} if len(shape) > SEQUENCE and rng.random() < 0.2 else {}
    return AVERAGE[len(shape)](
        3,
        stride=rng.choice([1, 2]),
        padding=1,
        ceil_mode=rng.random() < 0.3,
        count_include_pad=rng.random() < 0.5,
        **more,
    )


@block(SEQUENCE, IMAGE, VOLUME)
def power_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    inner = POWER[len(shape)](2, rng.choice([2, 3]), stride=rng.choice([1, 2]))
    return Apply(lambda self, x: self.inner(x.abs() + 0.1), inner=inner) if min(shape[2:]) >= 4 else None


@block(SEQUENCE, IMAGE, VOLUME)
def adaptive_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    return rng.choice([ADAPTIVE_AVERAGE, ADAPTIVE_MAXIMUM])[len(shape)](rng.choice([2, 3, 5]))


@block(IMAGE, VOLUME)
def fractional_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    if min(shape[2:]) < 5:
        return None
    return FRACTIONAL[len(shape)](2, **rng.choice([{"output_size": 3}, {"output_ratio": 0.6}]))


@block(SEQUENCE, IMAGE, VOLUME)
def unpool(rng: random.Random, shape: Shape) -> nn.Module | None:
    if any(size % 2 for size in shape[2:]):
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        pooled, indices = self.down(x)
        return self.up(pooled * 1.5, indices, output_size=x.shape)

    dims = len(shape)
    return Apply(function, down=MAXIMUM[dims](2, return_indices=True), up=UNPOOL[dims](2))


@block(IMAGE)
def pool_with_indices(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["max", "adaptive", "fractional"])
    if min(shape[2:]) < 6:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "max":
                pooled, indices = F.max_pool2d_with_indices(x, 2)
            case "adaptive":
                pooled, indices = F.adaptive_max_pool2d_with_indices(x, 3)
            case _:
                pooled, indices = F.fractional_max_pool2d_with_indices(x, 2, output_size=3)
        return pooled + indices.to(x.dtype) * 1e-3

    return Apply(function, kind)


@block(SEQUENCE, IMAGE, VOLUME)
def mixed_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    dims = len(shape)
    if min(shape[2:]) < 4:
        return None
    return Apply(
        lambda self, x: torch.cat([BY_NAME[dims](x, 2), self.average(x)], 1), average=AVERAGE[dims](2, stride=2)
    )


@block(IMAGE)
def blur_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    line = torch.tensor([1.0, 2.0, 1.0])
    kernel = (line[:, None] * line / 16).expand(shape[1], 1, 3, 3).contiguous()
    return Apply(
        lambda self, x: F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.kernel, stride=2, groups=x.shape[1]),
        kernel=kernel,
    )


@block(IMAGE)
def pyramid_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[2:]
        levels = [F.interpolate(F.adaptive_avg_pool2d(x, n), size, mode="bilinear") for n in (1, 2, 3)]
        return self.inner(torch.cat([x, *levels], 1))

    return Apply(function, inner=nn.Conv2d(4 * shape[1], shape[1], 1))
