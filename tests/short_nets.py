"""Known networks with each kind of block once or twice, as specs of a file: they compile in a part of the time.

A block more is the same ops once more. What a whole network adds, its length, is what benchmarks measure.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memfit.zoo import Example
from memfit.zoo.example import classifier_loss

__all__ = ["CONVNEXT", "MOBILENET", "RESNET", "convnext", "mobilenet", "resnet"]

RESNET, MOBILENET, CONVNEXT = (f"{__file__}:{name}" for name in ("resnet", "mobilenet", "convnext"))
"""Specs."""


def resnet(batch: int, shape: tuple[int, ...], device: torch.device, classes: int = 4) -> Example:
    """ResNet-18's stem, a block that keeps the size of the image and one that halves it, and the head."""
    resnets: Any = pytest.importorskip("torchvision.models.resnet")
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    skip = nn.Sequential(resnets.conv1x1(64, 128, 2), nn.BatchNorm2d(128))
    blocks = [resnets.BasicBlock(64, 64), resnets.BasicBlock(64, 128, 2, skip)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)]
    return classifier(nn.Sequential(*stem, *blocks, *head), batch, shape, device, classes)


def mobilenet(batch: int, shape: tuple[int, ...], device: torch.device, classes: int = 4) -> Example:
    """MobileNetV2 with a block that widens and has a skip, and one that does not widen and halves the image."""
    networks: Any = pytest.importorskip("torchvision.models.mobilenetv2")
    model = networks.MobileNetV2(num_classes=classes, inverted_residual_setting=[[6, 32, 1, 1], [1, 16, 1, 2]])
    return classifier(model, batch, shape, device, classes)


def convnext(batch: int, shape: tuple[int, ...], device: torch.device, classes: int = 4) -> Example:
    """ConvNeXt with a block in each stage."""
    timm: Any = pytest.importorskip("timm")
    model = timm.create_model("convnext_atto", num_classes=classes, depths=(1, 1, 1, 1))
    return classifier(model, batch, shape, device, classes)


def classifier(model: nn.Module, batch: int, shape: tuple[int, ...], device: torch.device, classes: int) -> Example:
    loss_fn = partial(classifier_loss, target=torch.randint(0, classes, (batch,)).to(device))
    return Example(model=model, args=(torch.randn(batch, *shape),), loss_fn=loss_fn)
