"""Losses that read outputs in their own ways, and outputs without a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.estimate.cases.step import Step, image, step_of, trunk

__all__ = ["CASES"]


def _with_target(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **more: Any) -> Step:
    target = torch.rand(8, 16, 128, 128)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Sigmoid())
    return step_of(model, image(8, size=128), loss=lambda y: loss(y, target), **more)


def mse_loss() -> Step:
    return _with_target(F.mse_loss)


def smooth_l1_loss() -> Step:
    return _with_target(F.smooth_l1_loss)


def binary_cross_entropy() -> Step:
    return _with_target(F.binary_cross_entropy)


def bce_with_logits() -> Step:
    return _with_target(F.binary_cross_entropy_with_logits)


def soft_margin_loss() -> Step:
    return _with_target(lambda y, target: F.soft_margin_loss(y, target.round() * 2 - 1))


def kl_div() -> Step:
    return _with_target(lambda y, target: F.kl_div(y.log(), target, reduction="batchmean"))


def dice_loss() -> Step:
    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        both = (y * target).sum((2, 3))
        return 1 - ((2 * both + 1) / (y.sum((2, 3)) + target.sum((2, 3)) + 1)).mean()

    return _with_target(loss)


def segmentation_loss() -> Step:
    target = torch.randint(0, 21, (4, 128, 128))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 21, 1))
    return step_of(model, image(4, size=128), loss=lambda y: F.cross_entropy(y, target))


def contrastive_loss() -> Step:
    def loss(y: torch.Tensor) -> torch.Tensor:
        y = F.normalize(y)
        return F.cross_entropy(y @ y.T / 0.1, torch.arange(len(y)).roll(len(y) // 2))

    return step_of(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128)), torch.randn(1024, 64), loss=loss)


def outputs_without_a_loss() -> Step:
    return step_of(trunk(), image(), loss=None)


CASES = (
    mse_loss,
    smooth_l1_loss,
    binary_cross_entropy,
    bce_with_logits,
    soft_margin_loss,
    kl_div,
    dice_loss,
    segmentation_loss,
    contrastive_loss,
    outputs_without_a_loss,
)
