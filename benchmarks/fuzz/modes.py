"""Modes: in which numbers, layouts and loops random models are tried, and with which levers they are fitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["MODES", "Mode", "autocast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to try a model.

    Attributes:
        name: on the command line.
        dtype: of parameters and inputs.
        autocast: the dtype of the autocast region around each step, None without one.
        channels_last: whether model and inputs are images in that layout.
        micro_batches: backward passes before the optimizer steps.
        forwards: forward passes before each backward pass.
        lazy: whether the model is fitted without inputs and without its loss, and planned at its first call.
        sizes: whether turns have inputs of other sizes: fewer samples, and shorter texts.
        hooks: whether hooks are registered, some before and some after the model is fitted.
        options: more arguments of `memfit.fit`.
        tolerance: largest difference, relative to the largest element; 0.0 asks for the same bits.
        shares: budgets as shares of the baseline peak; 0.0 is the least budget there is.
        device: of parameters and inputs.
    """

    name: str
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    channels_last: bool = False
    micro_batches: int = 1
    forwards: int = 1
    lazy: bool = False
    sizes: bool = False
    hooks: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    shares: tuple[float, ...] = (0.8, 0.55, 0.0)
    device: str = "cpu"


_ALL = (
    Mode(name="bitwise"),
    Mode(name="all", dtype=torch.float64, options={"levers": "all"}, tolerance=1e-12, shares=(0.6, 0.0)),
    Mode(name="disk", options={"tiers": "disk"}, shares=(0.6, 0.0)),
    Mode(name="bf16", autocast=torch.bfloat16, shares=(0.7, 0.0)),
    Mode(name="fp16", autocast=torch.float16, shares=(0.7, 0.0)),
    Mode(name="pure-bf16", dtype=torch.bfloat16, shares=(0.7, 0.0)),
    Mode(name="channels-last", channels_last=True, shares=(0.7, 0.0)),
    Mode(name="accumulate", micro_batches=2, shares=(0.8, 0.0)),
    Mode(name="hooks", hooks=True, shares=(1.2, 0.8)),
    Mode(name="lazy", lazy=True, shares=(1.5, 0.9, 0.7)),
    Mode(name="sizes", sizes=True, shares=(1.1, 0.85)),
    Mode(name="twice", forwards=2, shares=(1.2, 0.8)),
)

MODES = MappingProxyType({mode.name: mode for mode in _ALL})


@contextmanager
def autocast(mode: Mode) -> Iterator[None]:
    """The autocast region of a mode; nothing where it has none."""
    with torch.autocast(mode.device, mode.autocast or torch.bfloat16, enabled=mode.autocast is not None):
        yield
