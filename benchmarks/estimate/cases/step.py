"""The step that a case is, and the parts that many of them are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Step", "image", "mean", "step_of", "trunk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is estimated and measured.

    Attributes:
        model: in training mode.
        args: positional inputs.
        kwargs: keyword inputs.
        loss_fn: takes the output; None where the model returns its own loss or every output is differentiated.
        optimizer: of the trained parameters, if there is one.
        autocast: the dtype of an autocast region around the forward pass and the loss, if there is one.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def step_of(
    model: nn.Module, *args: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = mean, **more: Any
) -> Step:
    return Step(model=model.train(), args=args, loss_fn=loss, **more)


def image(batch: int = 8, channels: int = 3, size: int = 64) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def trunk(width: int = 32, norm: bool = True, **settings: Any) -> nn.Sequential:
    """Three convolutions of one width, with normalisation and activation."""
    made: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(3):
        made += [*([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
        made.append(nn.Conv2d(width, width, 3, **{"padding": 1, **settings}))
    return nn.Sequential(*made)
