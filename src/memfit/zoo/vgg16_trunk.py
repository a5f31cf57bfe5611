"""`zoo:vgg16-trunk`: the convolutions of VGG16 over a huge image, the model on which tiled convolution was measured.

Almost all its memory is a few feature maps of the full image; tiling by height and width is for such models. 13
convolutions without bias, each with a ReLU, and 5 max-pools; the whole remaining map is averaged, then a linear layer
512 → 1024 without bias and a softmax; the loss is the mean squared error.

Source: Simonyan and Zisserman 2015, configuration D; the sizes are those of the record (512² … 4096², batch 1). The
record does not state the target; here it is the one-hot vector of a random class.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import nn

from memfit.errors import SpecError
from memfit.zoo.example import (
    Example,
    Request,
    class_targets,
    finish,
    mean_squared_error,
    random_batch,
    sample_shape,
)

__all__ = ["make_vgg16_trunk", "vgg16_trunk"]

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Features, as multiples of those of the first stage, and convolutions."""


def vgg16_trunk(*, channels: int, height: int, width: int, classes: int, features: int = 64) -> nn.Sequential:
    """The trunk and its head.

    Args:
        channels: of the image.
        height: of the image, a multiple of 32.
        width: of the image, a multiple of 32.
        classes: outputs.
        features: of the first stage; the last one has eight times as many.

    Returns:
        A module from [N, channels, height, width] to probabilities [N, classes].
    """
    layers: list[nn.Module] = []
    for multiple, convolutions in _STAGES:
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, multiple * features, 3, padding=1, bias=False), nn.ReLU()]
            channels = multiple * features
        layers.append(nn.MaxPool2d(2))
    head = [nn.AvgPool2d((height // 32, width // 32)), nn.Flatten(), nn.Linear(channels, classes, bias=False)]
    return nn.Sequential(*layers, *head, nn.Softmax(dim=1))


def make_vgg16_trunk(request: Request, *, classes: int = 1024, features: int = 64) -> Example:
    """The trunk with images and one-hot targets."""
    channels, height, width = shape = sample_shape(request, (3, 512, 512), "C×H×W")
    if height % 32 or width % 32:
        raise SpecError(f"{request.title} halves the image five times; use multiples of 32 (shape: {shape})")
    model = vgg16_trunk(channels=channels, height=height, width=width, classes=classes, features=features)
    target = F.one_hot(class_targets(request, classes), classes).to(request.dtype)
    return finish(request, model, (random_batch(request, shape),), loss_fn=partial(mean_squared_error, target=target))
