"""Weights that are not simply trained: frozen ones, parametrised ones, and gradients sample by sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from benchmarks.estimate.cases.step import Step, image, mean, step_of, trunk

__all__ = ["CASES"]


def frozen_convolutions() -> Step:
    """The trunk is frozen, only a head is trained."""
    model = nn.Sequential(trunk().requires_grad_(False), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
    return step_of(model, image())


def frozen_under_trained() -> Step:
    """A frozen trunk between trained layers: its inputs need not be kept, gradients pass through it."""
    frozen = nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())))
    return step_of(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), frozen.requires_grad_(False)), image())


def frozen_batch_norm() -> Step:
    """Statistics and weights of the normalisations are frozen, as detectors do."""
    model = trunk().train()
    for part in model:
        if isinstance(part, nn.BatchNorm2d):
            part.eval().requires_grad_(False)
    return Step(model=model, args=(image(),), loss_fn=mean)


def frozen_linear() -> Step:
    """A frozen transformer with low-rank trained additions."""
    return step_of(nn.Sequential(*(_LowRank(256) for _ in range(4))), torch.randn(16, 128, 256))


class _LowRank(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return F.gelu(self.whole(x) + self.up(self.down(x)))


def weight_norm() -> Step:
    norm = torch.nn.utils.parametrizations.weight_norm
    conv = nn.Conv1d
    model = nn.Sequential(*(m for _ in range(3) for m in (norm(conv(64, 64, 5, padding=2)), nn.LeakyReLU(0.1))))
    return step_of(model, torch.randn(4, 64, 2048))


def weight_norm_old() -> Step:
    norm = torch.nn.utils.weight_norm
    model = nn.Sequential(*(m for _ in range(3) for m in (norm(nn.Linear(1024, 1024)), nn.Tanh())))
    return step_of(model, torch.randn(256, 1024))


def spectral_norm() -> Step:
    norm = torch.nn.utils.parametrizations.spectral_norm
    conv = nn.Conv2d
    model = nn.Sequential(
        norm(conv(3, 32, 3, padding=1)), nn.LeakyReLU(0.1), norm(conv(32, 64, 4, 2, 1)), nn.LeakyReLU(0.1)
    )
    return step_of(model, image(8))


class _Ternary(nn.Module):
    def forward(self, weight: torch.Tensor) -> Any:
        return weight + (weight.sign() * weight.abs().mean() - weight).detach()


def quantised_weights() -> Step:
    """Weights rounded in the forward pass, straight through in the backward pass."""
    layers = [nn.Linear(1024, 1024) for _ in range(3)]
    for layer in layers:
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", _Ternary())
    return step_of(nn.Sequential(*layers), torch.randn(256, 1024))


class _PerSample(nn.Module):
    """Gradients of a small network, sample by sample, inside the forward pass, with a loss on their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 32))

    def forward(self, x: torch.Tensor) -> Any:
        values: dict[str, Any] = dict(self.inner.named_parameters())

        def loss(values: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return mean(functional_call(self.inner, values, (sample,)))

        found = vmap(grad(loss), in_dims=(None, 0))(values, x)
        return sum(g.flatten(1).square().sum(1) for g in found.values())


def per_sample_gradients() -> Step:
    return step_of(_PerSample(), torch.randn(64, 128), loss=lambda y: y.mean())


CASES = (
    frozen_convolutions,
    frozen_under_trained,
    frozen_batch_norm,
    frozen_linear,
    weight_norm,
    weight_norm_old,
    spectral_norm,
    quantised_weights,
    per_sample_gradients,
)
