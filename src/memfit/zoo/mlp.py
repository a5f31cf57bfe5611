"""`zoo:mlp`: linear layers with ReLU, the smallest model on which everything can be counted by hand."""

from __future__ import annotations

from torch import nn

from memfit.zoo.example import Example, Request, classifier, sample_shape

__all__ = ["make_mlp", "mlp"]


def mlp(*, features: int, width: int, layers: int, classes: int) -> nn.Sequential:
    """The network.

    Args:
        features: inputs.
        width: of each hidden layer.
        layers: hidden layers.
        classes: outputs.

    Returns:
        A module from [N, features] to logits [N, classes].
    """
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*modules, nn.Linear(features, classes))


def make_mlp(request: Request, *, width: int = 1024, layers: int = 4, classes: int = 10) -> Example:
    """The network with vectors and labels; the shape gives the number of features, 784 by default."""
    shape = sample_shape(request, (784,), "F")
    model = mlp(features=shape[0], width=width, layers=layers, classes=classes)
    return classifier(request, model, shape, classes)
