"""Other dtypes and other gradients: double and half precision, autocast, inputs' gradients, unused outputs."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.estimate.cases.sequences import self_attention
from benchmarks.estimate.cases.step import Step, image, mean, step_of, trunk

__all__ = ["CASES"]


def double_precision() -> Step:
    return step_of(trunk(16).double(), image(8).double())


def bf16_autocast() -> Step:
    return step_of(trunk(), image(), autocast=torch.bfloat16)


def bf16_autocast_attention() -> Step:
    return self_attention(0.1, autocast=torch.bfloat16)


def pure_bf16() -> Step:
    return step_of(trunk().bfloat16(), image().bfloat16())


def input_gradient() -> Step:
    return step_of(trunk(), image().requires_grad_())


def unused_output() -> Step:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.other = trunk(), nn.Conv2d(32, 8, 1), nn.Conv2d(32, 64, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.trunk(x)
            return self.one(x), self.other(x)

    return step_of(Two(), image(), loss=lambda output: mean(output[0]))


CASES = (
    double_precision,
    bf16_autocast,
    bf16_autocast_attention,
    pure_bf16,
    input_gradient,
    unused_output,
)
