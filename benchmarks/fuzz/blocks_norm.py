"""Normalisation: batch, group, instance, layer, root mean square, local response, and what is written by hand."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import ANY, IMAGE, SEQUENCE, VECTOR, VOLUME, Apply, Shape, block, weight

BATCH = {VECTOR: nn.BatchNorm1d, SEQUENCE: nn.BatchNorm1d, IMAGE: nn.BatchNorm2d, VOLUME: nn.BatchNorm3d}
INSTANCE = {SEQUENCE: nn.InstanceNorm1d, IMAGE: nn.InstanceNorm2d, VOLUME: nn.InstanceNorm3d}


@block(*ANY)
def batch_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    return BATCH[len(shape)](
        shape[1],
        momentum=rng.choice([0.1, 0.1, None]),
        affine=rng.random() < 0.7,
        track_running_stats=rng.random() < 0.8,
    )


@block(SEQUENCE)
def batch_norm_over_tokens(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(lambda self, x: self.inner(x.transpose(1, 2)).transpose(1, 2), inner=nn.BatchNorm1d(shape[2]))


class FrozenBatchNorm(nn.BatchNorm2d):
    """Batch normalisation that stays in eval mode, as fine-tuned detectors have it."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)


@block(IMAGE)
def frozen_batch_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    return FrozenBatchNorm(shape[1])


@block(VECTOR, IMAGE)
def ghost_batch_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Halves of the batch, normalised one after the other: running statistics move twice."""
    if shape[0] < 4:
        return None
    return Apply(
        lambda self, x: torch.cat([self.inner(part) for part in x.chunk(2)]), inner=BATCH[len(shape)](shape[1])
    )


@block(*ANY)
def batch_norm_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(
        lambda self, x: F.batch_norm(x, self.mean, self.variance, self.weight, training=True, momentum=0.3),
        mean=torch.zeros(shape[1]),
        variance=torch.ones(shape[1]),
        weight=weight(shape[1]),
    )


@block(SEQUENCE, IMAGE, VOLUME)
def group_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    groups = rng.choice([1, 2, shape[1]]) if shape[1] % 2 == 0 else 1
    return nn.GroupNorm(groups, shape[1], affine=rng.random() < 0.7)


@block(SEQUENCE, IMAGE, VOLUME)
def instance_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    return INSTANCE[len(shape)](shape[1], affine=rng.random() < 0.5, track_running_stats=rng.random() < 0.5)


@block(*ANY)
def layer_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    axes = rng.choice([shape[-1:], shape[1:]])
    return nn.LayerNorm(axes, elementwise_affine=rng.random() < 0.7)


@block(IMAGE)
def layer_norm_over_channels(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(
        lambda self, x: self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        inner=rng.choice([nn.LayerNorm, nn.RMSNorm])(shape[1]),
    )


@block(*ANY)
def rms_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    return nn.RMSNorm(shape[-1], elementwise_affine=rng.random() < 0.7)


@block(SEQUENCE)
def rms_norm_by_hand(rng: random.Random, shape: Shape) -> nn.Module | None:
    """As language models write it: in float32 whatever comes in."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype is not torch.float64 else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)

    return Apply(function, weight=weight(shape[2]))


@block(IMAGE)
def response_norm(rng: random.Random, shape: Shape) -> nn.Module | None:
    return rng.choice([nn.LocalResponseNorm, nn.CrossMapLRN2d])(3)


@block(*ANY)
def normalised(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["length", "deviation", "variance", "sum", "renorm", "var_mean", "whole", "response"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "length":
                return F.normalize(x, dim=-1)
            case "deviation":
                return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)
            case "variance":
                return x / (x.var(1, keepdim=True, correction=0) + 1).sqrt()
            case "sum":
                return x / (x.abs().sum(-1, keepdim=True) + 1)
            case "renorm":
                return torch.renorm(x, 2, 0, 1.0)
            case "var_mean":
                variance, mean = torch.var_mean(x, -1, keepdim=True)
                return (x - mean) * torch.rsqrt(variance + 1e-5)
            case "whole":
                return (x - x.mean()) / (x.std() + 1e-2)
            case _:  # of ConvNeXt V2
                lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
                return x + 0.5 * x * (lengths / (lengths.mean() + 1e-6))

    return Apply(function, kind)
