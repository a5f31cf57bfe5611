"""Signals and complex numbers: Fourier transforms, spectral layers, complex weights, short-time transforms."""

from __future__ import annotations

import random

import torch
from torch import nn

from benchmarks.fuzz.block import IMAGE, SEQUENCE, VECTOR, Apply, Shape, block, weight


@block(VECTOR, SEQUENCE, IMAGE)
def transformed(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["real", "whole", "imaginary", "shift", "magnitude", "phase"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "real":
                return torch.fft.irfft(torch.fft.rfft(x) * 0.9, n=x.shape[-1])
            case "whole":
                return torch.fft.ifft(torch.fft.fft(x, dim=1), dim=1).real
            case "imaginary":
                return torch.fft.fft(x).imag + x
            case "shift":
                return torch.fft.ifftn(torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fftn(x)))).real
            case "magnitude":
                return x + torch.fft.fft(x).abs().log1p()
        return x + torch.angle(torch.fft.fft(x) + 0.1)

    return Apply(function, kind)


@block(IMAGE)
def spectral_layer(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A Fourier neural operator's layer: a few frequencies, mixed by complex weights."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        mixing = torch.view_as_complex(self.weight.to(x.dtype))
        out[..., :3, :3] = torch.einsum("bihw,iohw->bohw", spectrum[..., :3, :3], mixing)
        return torch.fft.irfft2(out, s=x.shape[-2:])

    return Apply(function, weight=weight(shape[1], shape[1], 3, 3, 2, scale=0.3)) if min(shape[2:]) >= 6 else None


@block(VECTOR, SEQUENCE)
def complex_numbers(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["view", "polar", "complex", "rotate"])
    if shape[-1] % 2:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (-1, 2)).contiguous()
        match kind:
            case "view":
                return torch.view_as_real(torch.view_as_complex(pairs) * self.turn).flatten(-2)
            case "polar":
                return torch.view_as_real(torch.polar(pairs[..., 0].abs() + 0.1, pairs[..., 1])).flatten(-2)
            case "complex":
                return torch.complex(pairs[..., 0], pairs[..., 1]).square().abs()
        z = torch.view_as_complex(pairs)
        return torch.cat([z.real, z.conj().imag], -1)

    turn = torch.polar(torch.ones(shape[-1] // 2), torch.rand(shape[-1] // 2))
    return Apply(function, kind, turn=turn)


@block(VECTOR)
def short_time(rng: random.Random, shape: Shape) -> nn.Module | None:
    if shape[-1] < 16:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 8, 4, window=self.window.to(x.dtype), return_complex=True)
        return spectrum.abs().flatten(1)

    return Apply(function, window=torch.hann_window(8))


@block(SEQUENCE)
def long_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    """A filter as long as the sequence, by way of the Fourier transform."""

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        n = 2 * x.shape[1]
        made = torch.fft.rfft(x, n, dim=1) * torch.fft.rfft(self.filter, n, dim=0)
        return torch.fft.irfft(made, n, dim=1)[:, : x.shape[1]] + x

    return Apply(function, filter=weight(shape[1], shape[2], scale=0.2))
