"""Activations of `torch.nn` and `torch.nn.functional`, in place where they can be, gated ones, and every softmax."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.fuzz.block import ANY, IMAGE, SEQUENCE, VECTOR, VOLUME, Apply, Shape, block

ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip
IN_PLACE = (
    nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.RReLU, nn.ReLU, nn.ReLU6,
    nn.SELU, nn.SiLU,
)  # fmt: skip
FUNCTIONS = (
    F.celu, F.elu, F.gelu, F.hardshrink, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish,
    F.relu, F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.softshrink, F.softsign, F.tanh, F.tanhshrink, F.rrelu,
)  # fmt: skip
OVERWRITING = (F.celu_, F.elu_, F.hardtanh_, F.leaky_relu_, F.relu_, F.rrelu_, F.selu_)


@block(*ANY)
def activation(rng: random.Random, shape: Shape) -> nn.Module | None:
    return rng.choice(ACTIVATIONS)()


@block(*ANY)
def activation_in_place(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Over something that may be overwritten: a result of a cheap op, or of a linear one."""
    before = rng.choice(["scale", "linear"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 1.1 if before == "scale" else self.linear(x))

    return Apply(function, before, inner=rng.choice(IN_PLACE)(inplace=True), linear=nn.Linear(shape[-1], shape[-1]))


@block(*ANY)
def activation_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    function = rng.choice([*FUNCTIONS, *OVERWRITING])
    return Apply(lambda self, x: function(x * 0.9), function.__name__)


@block(*ANY)
def threshold(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["module", "in place", "function"])
    match kind:
        case "module":
            return nn.Threshold(0.1, 0.3)
        case "in place":
            return Apply(lambda self, x: F.threshold_(x * 1.1, 0.1, 0.3), kind)
    return Apply(lambda self, x: F.threshold(x, -0.1, 0.0), kind)


@block(SEQUENCE, IMAGE, VOLUME)
def slopes_of_channels(rng: random.Random, shape: Shape) -> nn.Module | None:
    return nn.PReLU(shape[1], init=rng.choice([0.25, -0.1]))


@block(*ANY)
def gated(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["module", "function", "hand", "swish", "tanh"])
    axis = rng.choice([1, -1])
    if shape[axis] % 2 or shape[axis] < 4:
        return None

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        if kind == "function":
            return F.glu(x, axis)
        value, gate = x.chunk(2, axis)
        match kind:
            case "hand":
                return value * torch.sigmoid(gate)
            case "swish":
                return F.silu(gate) * value
        return torch.tanh(value) * F.gelu(gate, approximate="tanh")

    return nn.GLU(axis) if kind == "module" else Apply(function, kind)


@block(*ANY)
def softmax(rng: random.Random, shape: Shape) -> nn.Module | None:
    made = [nn.Softmax(-1), nn.Softmax(1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.LogSoftmax(1)]
    if len(shape) == IMAGE:
        made.append(nn.Softmax2d())
    return rng.choice(made)


@block(*ANY)
def softmax_function(rng: random.Random, shape: Shape) -> nn.Module | None:
    kind = rng.choice(["softmax", "log_softmax", "softmin", "gumbel", "hard gumbel", "sparse", "temperature"])

    def function(self: Apply, x: torch.Tensor) -> torch.Tensor:
        match kind:
            case "softmax":
                return F.softmax(x, -1)
            case "log_softmax":
                return F.log_softmax(x, 1)
            case "softmin":
                return F.softmin(x, -1)
            case "gumbel":
                return F.gumbel_softmax(x, tau=0.7)
            case "hard gumbel":
                return x * F.gumbel_softmax(x, hard=True)
            case "sparse":
                return F.relu(x - x.mean(-1, keepdim=True)) + x.softmax(-1)
        return torch.softmax(x / 0.3, -1, dtype=torch.float64).to(x.dtype)

    return Apply(function, kind)


@block(*ANY)
def log_sum_exp(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(lambda self, x: x - torch.logsumexp(x, -1, keepdim=True))


@block(VECTOR, SEQUENCE)
def maxout(rng: random.Random, shape: Shape) -> nn.Module | None:
    return Apply(
        lambda self, x: self.inner(x).unflatten(-1, (8, 3)).max(-1).values,
        inner=nn.Linear(shape[-1], 24),
    )
