"""`zoo:keras-cnn`: the sample CNN of a Keras port of gradient checkpointing, many full-resolution maps, few parameters.

Eleven 5×5 convolutions with bias and ReLU at full resolution, each followed by a max-pool of window 1 (the last one
of window 2), then linear layers to 32 and 10. Source: the widths of its program
(pidajay/tf2_gradient_checkpointing, `gradient_checkpoint_profile.py`). They agree with the record: the 370 channels
before and 355 after the pools are 2900 MiB at batch 16 of 256×256×1 (measured: 2909.8), the 10.8 million parameters
are 41.3 MiB (measured: gradients of 39.4).

A max-pool of window 1 returns a copy, which TensorFlow holds in addition to its input. Here it is an average-pool of
window 1: it gives the same values and holds the same two maps, without the int64 indices of torch's max-pool, which
would double the memory of the original.

Known limits: the last pool holds indices (40 MiB at batch 16).
"""

from __future__ import annotations

from torch import nn

from memfit.zoo.example import Example, Request, classifier, sample_shape

__all__ = ["keras_cnn", "make_keras_cnn"]

_WIDTHS = (10, 20, 40, 60, 40, 40, 40, 40, 40, 20, 20)


def keras_cnn(*, channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """The network.

    Args:
        channels: of the image.
        height: of the image.
        width: of the image.
        classes: outputs.

    Returns:
        A module from [N, channels, height, width] to logits [N, classes].
    """
    layers: list[nn.Module] = []
    for features in _WIDTHS:
        layers += [nn.Conv2d(channels, features, 5, padding=2), nn.ReLU(), nn.AvgPool2d(1)]
        channels = features
    layers[-1] = nn.MaxPool2d(2, ceil_mode=True)
    flat = channels * -(-height // 2) * -(-width // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 32), nn.ReLU(), nn.Linear(32, classes))


def make_keras_cnn(request: Request, *, classes: int = 10) -> Example:
    """The network with images and labels."""
    channels, height, width = shape = sample_shape(request, (1, 256, 256), "C×H×W")
    model = keras_cnn(channels=channels, height=height, width=width, classes=classes)
    return classifier(request, model, shape, classes)
