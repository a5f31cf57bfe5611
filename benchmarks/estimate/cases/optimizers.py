"""Optimizers, whose state and step count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.estimate.cases.step import Step, step_of

__all__ = ["CASES"]


def _optimised(make: Callable[[Any], torch.optim.Optimizer], width: int = 1024) -> Step:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())))
    return step_of(model, torch.randn(64, width), optimizer=make(model.parameters()))


def sgd() -> Step:
    return _optimised(lambda p: torch.optim.SGD(p, 0.01))


def momentum() -> Step:
    return _optimised(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))


def adamw() -> Step:
    return _optimised(torch.optim.AdamW)


def adamw_foreach() -> Step:
    return _optimised(lambda p: torch.optim.AdamW(p, foreach=True))


def adafactor() -> Step:
    return _optimised(torch.optim.Adafactor)


def rmsprop() -> Step:
    return _optimised(lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9))


CASES = (
    sgd,
    momentum,
    adamw,
    adamw_foreach,
    adafactor,
    rmsprop,
)
