"""Small models and batches for the scripts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["encoder", "images", "labels", "perceptron", "sgd", "tokens", "transformer"]


def encoder(out: int = 16, *, dropout: float = 0.1) -> nn.Module:
    """A few convolutions with batch norm."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, out),
    )


def perceptron(inputs: int, out: int, *, width: int = 64, dropout: float = 0.0) -> nn.Module:
    """Three layers."""
    layers = [nn.Linear(inputs, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, out))


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.table(x)))


def transformer(vocabulary: int = 50, width: int = 32) -> nn.Module:
    """Two layers over tokens."""
    return _Transformer(vocabulary, width)


def images(number: int, *, batch: int = 8, size: int = 16) -> torch.Tensor:
    """The n-th batch."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(number))


def tokens(number: int, *, batch: int = 4, length: int = 16, vocabulary: int = 50) -> torch.Tensor:
    """The n-th batch."""
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(number))


def labels(number: int, classes: int = 10, *, batch: int = 8) -> torch.Tensor:
    """The n-th batch's."""
    return torch.randint(0, classes, (batch,), generator=torch.Generator().manual_seed(number))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most scripts."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], 0.01, momentum=0.9)
