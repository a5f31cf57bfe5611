"""Writing in place: over results, over views, through slices, and over what the caller gave."""

from __future__ import annotations

import random

import torch
from torch import nn

from benchmarks.fuzz.block import ANY, IMAGE, SEQUENCE, Apply, Shape, block

KINDS = (
    "add", "mul", "relu", "chain", "first sample", "zero", "copy", "view", "clamp", "fill", "transposed", "split",
    "out", "masked", "accumulate", "detached", "index_add_", "lerp_",
)  # fmt: skip


@block(*ANY)
def written(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(KINDS)

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.1
        match kind:
            case "add":
                y += x
            case "mul":
                y.mul_(self.scale)
            case "relu":
                y.add_(1).relu_()
            case "chain":
                y.add_(x).mul_(0.5).sigmoid_()
            case "first sample":
                y[0] *= 2
            case "zero":
                y[..., 0].zero_()
            case "copy":
                y[:, 0].copy_(x[:, -1])
            case "view":
                flat = y.view(-1) if y.is_contiguous() else y.reshape(-1)
                flat.mul_(0.5)
                return y + flat.view(y.shape)
            case "clamp":
                y.clamp_(-1, 1)
            case "fill":
                z = torch.zeros_like(x)
                z[..., 0] = x[..., 0]
                return z.add_(y)
            case "transposed":
                y.transpose(0, 1).mul_(1.5)
            case "split":
                for part in y.tensor_split(2, -1):
                    part.sin_()
            case "out":
                z = torch.empty_like(x.detach())
                torch.add(x.detach(), 1.0, out=z)
                return y + z
            case "masked":
                y.masked_fill_(x < 0, 0.1)
            case "accumulate":
                z = torch.zeros_like(x)
                for k in range(3):
                    z += x * k
                return z * 0.3
            case "detached":
                with torch.no_grad():
                    y.detach().mul_(2)
            case "index_add_":
                y.index_add_(1, self.index, x[:, :1])
            case _:
                y.lerp_(x, 0.3)
        return y

    members = {"scale": nn.Parameter(torch.tensor(0.9)), "index": torch.zeros(1, dtype=torch.long)}
    return Apply(function, kind, **members)


@block(SEQUENCE, IMAGE)
def branch_written(rng: random.Random, shape: Shape) -> nn.Module | None:
    """One of two readers of a result writes over its own copy or over the other's view."""
    kind = rng.choice(["copy", "after", "norm"])
    norm = nn.LayerNorm(shape[-1])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if kind == "copy":
            z = y.clone()
            z[:, 0] = 0
            return y + z
        if kind == "after":
            kept = y.sum()
            y.mul_(0.5)
            return y + kept * 1e-3
        return y.relu_() + x

    return Apply(function, kind, norm=norm)
