"""Blocks and shapes of models: pooling, normalisation, skips, experts, graph breaks, shared modules, spectra."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.estimate.cases.step import Step, image, step_of, trunk

__all__ = ["CASES"]


def pooling_and_resizing() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 16, 3, padding=1), nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"),
    )  # fmt: skip
    return step_of(model, image(8))


def normalisations() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.GroupNorm(4, 32), nn.SiLU(), nn.InstanceNorm2d(32, affine=True), nn.Conv2d(32, 32, 1),
        nn.LocalResponseNorm(3), nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32),
    )  # fmt: skip
    return step_of(model, image(8))


def activations() -> Step:
    kinds = (nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.PReLU, nn.Hardswish, nn.LogSigmoid, nn.Softmax)
    return step_of(nn.Sequential(*(m for kind in kinds for m in (nn.Linear(256, 256), kind()))), torch.randn(1024, 256))


def dropouts() -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 1), nn.Dropout(0.5), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(32, 32, 1), nn.Dropout(0.3, True)
    )
    return step_of(model, image(8))


class _Skips(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + width * i, width, 3, padding=1) for i in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return x


def concatenations() -> Step:
    return step_of(_Skips(), image(8, size=48))


class _Experts(nn.Module):
    """Rows sorted to experts, with sizes that depend on data: the graph breaks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(width, width), nn.Linear(width, 4)
        self.experts, self.last = nn.ModuleList(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.gelu(self.first(x))
        choice = self.gate(x).argmax(-1)
        counts = torch.bincount(choice, minlength=4).tolist()
        order = choice.argsort()
        parts = [expert(part) for expert, part in zip(self.experts, x[order].split(counts), strict=True)]
        return self.last(F.gelu(torch.cat(parts)[order.argsort()]))


def experts() -> Step:
    return step_of(_Experts(), torch.randn(4096, 256))


def graph_break() -> Step:
    first, last = trunk(16), trunk(16)
    last[0] = nn.Conv2d(16, 16, 3, padding=1)
    return step_of(_Broken(first, last), image(8))


class _Broken(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def shared_module() -> Step:
    layer = nn.Linear(512, 512)
    return step_of(nn.Sequential(layer, nn.GELU(), layer, nn.GELU(), layer), torch.randn(2048, 512))


def complex_and_fft() -> Step:
    return step_of(_Spectral(), torch.randn(8, 16, 64, 64))


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 64, 33, dtype=torch.complex64) * 0.05)
        self.beside = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        made = torch.einsum("bihw,iohw->bohw", torch.fft.rfft2(x), self.weight)
        return F.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + self.beside(x))


CASES = (
    pooling_and_resizing,
    normalisations,
    activations,
    dropouts,
    concatenations,
    experts,
    graph_break,
    shared_module,
    complex_and_fft,
)
