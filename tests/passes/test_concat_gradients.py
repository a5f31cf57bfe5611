"""Gradients of concatenations are cut up only where that changes no bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memfit.capture.training_step import Capture, capture_step
from memfit.compiler.request import Request
from memfit.ops.kernels.convolution import convolution_input_slices
from memfit.tools.verify import verify

CHANNELS = 16
READERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": nn.Identity,
    "transposed": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
    "relu": nn.ReLU,
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "group norm": lambda: nn.GroupNorm(4, CHANNELS),
    "prelu": lambda: nn.PReLU(CHANNELS),
    "gelu": nn.GELU,
    "pooling": lambda: nn.AvgPool2d(3, 1, 1),
}
"""What reads a slice in the backward pass: the module before the concatenation."""


class Concatenation(nn.Module):
    """Two branches; the gradient of the longer one is long in being read again."""

    def __init__(self, reader: Callable[[], nn.Module], length: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        longer: list[nn.Module] = []
        for _ in range(length):
            longer += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()]
        self.branches = nn.ModuleList(
            nn.Sequential(*more, nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), reader()) for more in ([], longer)
        )
        self.last = nn.Conv2d(2 * CHANNELS, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.last(torch.cat([branch(x) for branch in self.branches], dim=1))


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def cut(capture: Capture) -> bool:
    return any(op is not None and op.node.target is convolution_input_slices for op in capture.joint_ops)


class AllOf(nn.Module):
    """One concatenation for each reader, side by side."""

    def __init__(self, length: int) -> None:
        super().__init__()
        readers = [*READERS.items()][:: 2 if length else 1]
        self.of = nn.ModuleDict({name: Concatenation(reader, length) for name, reader in readers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([concatenation(x) for concatenation in self.of.values()])


@pytest.mark.smoke
@pytest.mark.parametrize("length", [0, 3])
def test_same_bits(length: int) -> None:
    torch.manual_seed(0)
    model, x = AllOf(length), torch.randn(2, 3, 33, 31)
    assert not verify(model, (x,), {}, Request(budget="1GiB", loss_fn=loss_fn, prove=False)).differing


@pytest.mark.parametrize(("name", "expected"), [("convolution", True), ("relu", True), ("batch norm", False)])
def test_which_are_cut(name: str, expected: bool) -> None:
    model, x = Concatenation(READERS[name], 0), torch.randn(2, 3, 9, 9)
    assert cut(capture_step(model, (x,), {}, loss_fn=loss_fn)) is expected
