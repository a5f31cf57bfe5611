"""Convolutions of every kind: strided, grouped, dilated, transposed, in one to three dimensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.estimate.cases.step import Step, image, step_of, trunk

__all__ = ["CASES"]


def convolutions() -> Step:
    return step_of(trunk(), image())


def convolutions_of_one_image() -> Step:
    return step_of(trunk(), image(1, size=192))


def in_place_activations() -> Step:
    conv = nn.Conv2d
    model = nn.Sequential(conv(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(True), conv(32, 32, 3), nn.ReLU(True))
    return step_of(model, image())


def strided_convolutions() -> Step:
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU())
    return step_of(model, image(8, size=128))


def channels_last() -> Step:
    return step_of(trunk().to(memory_format=torch.channels_last), image().to(memory_format=torch.channels_last))


def dilated_convolutions() -> Step:
    return step_of(trunk(padding=2, dilation=2), image())


def grouped_convolutions() -> Step:
    return step_of(trunk(groups=4), image())


def depthwise_convolutions() -> Step:
    return step_of(trunk(groups=32), image())


def transposed_convolutions() -> Step:
    up = nn.ConvTranspose2d
    return step_of(nn.Sequential(up(3, 32, 4, 2, 1), nn.ReLU(), up(32, 16, 4, 2, 1), nn.ReLU()), image(8, size=32))


def convolutions_1d() -> Step:
    conv = nn.Conv1d
    model = nn.Sequential(
        conv(4, 64, 9, padding=4), nn.BatchNorm1d(64), nn.GELU(), conv(64, 64, 9, padding=4), nn.GELU()
    )
    return step_of(model, torch.randn(8, 4, 2048))


def convolutions_1d_dilated() -> Step:
    conv = nn.Conv1d
    model = nn.Sequential(conv(4, 64, 3, dilation=4), nn.Tanh(), conv(64, 64, 3, dilation=8), nn.Tanh())
    return step_of(model, torch.randn(8, 4, 2048))


def convolutions_3d() -> Step:
    conv = nn.Conv3d
    model = nn.Sequential(
        conv(2, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), conv(16, 16, 3, padding=1), nn.ReLU()
    )
    return step_of(model, torch.randn(2, 2, 24, 24, 24))


class UNet3d(nn.Module):
    """Two levels, a transposed convolution and a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1), nn.InstanceNorm3d(width), nn.LeakyReLU(0.01, True)
        )
        self.down = nn.Sequential(
            nn.Conv3d(width, 2 * width, 3, 2, 1), nn.InstanceNorm3d(2 * width), nn.LeakyReLU(0.01)
        )
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.last = nn.Sequential(nn.Conv3d(2 * width, width, 3, padding=1), nn.LeakyReLU(0.01), nn.Conv3d(width, 3, 1))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.last(torch.cat([self.up(self.down(x)), x], 1))


def u_net_3d() -> Step:
    target = torch.randint(0, 3, (2, 24, 24, 24))
    return step_of(UNet3d(), torch.randn(2, 1, 24, 24, 24), loss=lambda y: F.cross_entropy(y, target))


CASES = (
    convolutions,
    convolutions_of_one_image,
    in_place_activations,
    strided_convolutions,
    channels_last,
    dilated_convolutions,
    grouped_convolutions,
    depthwise_convolutions,
    transposed_convolutions,
    convolutions_1d,
    convolutions_1d_dilated,
    convolutions_3d,
    u_net_3d,
)
