"""`zoo:unet`: a U-Net with BatchNorm, one label for each pixel.

Its skips are long and wide: the first map, which is the largest, is read again at the end, so no cut of the network is
narrow.

Source: Ronneberger, Fischer and Brox 2015; here the convolutions are padded, so that the output has the size of the
input, and have BatchNorm instead of a bias.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from memfit.errors import SpecError
from memfit.zoo.example import (
    Example,
    Request,
    class_targets,
    classifier_loss,
    finish,
    random_batch,
    sample_shape,
)

__all__ = ["UNet", "make_unet"]


def _double(channels: int, features: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, features):
        layers += [nn.Conv2d(inputs, features, 3, padding=1, bias=False), nn.BatchNorm2d(features), nn.ReLU(True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net.

    Args:
        channels: of the image.
        classes: labels of a pixel.
        width: features at full resolution; they double at each level.
        depth: number of times that the image is halved.
    """

    def __init__(self, *, channels: int = 3, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """From images [N, channels, H, W] to logits [N, classes, H, W]; H and W are multiples of 2^depth."""
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def make_unet(request: Request, *, classes: int = 2, width: int = 64, depth: int = 4) -> Example:
    """The network with images and a label for each pixel."""
    channels, high, wide = shape = sample_shape(request, (3, 256, 256), "C×H×W")
    if high % 2**depth or wide % 2**depth:
        raise SpecError(
            f"{request.title} halves the image {depth} times; use multiples of {2**depth} or another depth= "
            f"(shape: {shape})"
        )
    model = UNet(channels=channels, classes=classes, width=width, depth=depth)
    inputs, target = random_batch(request, shape), class_targets(request, classes, high, wide)
    return finish(request, model, (inputs,), loss_fn=partial(classifier_loss, target=target))
