"""Steps that pipelines are tried on: a model, its inputs, its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.zoo.gpt import GPT
from tests import models

__all__ = ["CASES", "LOSSES", "Case", "gradients", "baseline_step"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def gpt(batch: int, dtype: torch.dtype, *, dropout: float = 0.0) -> Case:
    model = GPT(layers=1, width=32, heads=2, positions=12, vocabulary=40, dropout=dropout, tied=True).to(dtype)
    x, y = torch.randint(40, (2, batch, 12))
    return Case(model=model, args=(x,), target=y, loss_fn=tokens_loss)


def some_ignored(batch: int, dtype: torch.dtype) -> Case:
    """Weighted classes, and targets that do not count."""
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 40)).to(dtype)
    x, y = torch.randint(40, (2, batch, 12))
    y[torch.rand(y.shape) < 0.4] = -100
    loss = nn.CrossEntropyLoss(weight=torch.rand(40, dtype=dtype) + 0.5)
    return Case(model=model, args=(x,), target=y, loss_fn=lambda o, t: loss(o.flatten(0, 1), t.flatten()))


def own_size(batch: int, dtype: torch.dtype) -> Case:
    """A sum that the loss itself divides by the number of samples."""
    case = skips(batch, dtype)
    return Case(
        model=case.model,
        args=case.args,
        target=case.target,
        loss_fn=lambda output, target: (output[0] - target).square().sum() / len(target),
    )


def own_loss(batch: int, dtype: torch.dtype) -> Case:
    """The loss inside, a keyword input, tied weights."""
    x, y = torch.randint(50, (2, batch, 9))
    model = models.Tied().to(dtype)
    model.layers = model.layers[:2]
    model.drop.p = 0.0
    return Case(model=model, args=(x,), kwargs={"labels": y})


def masked(batch: int, dtype: torch.dtype) -> Case:
    """Constant masks in every layer, one output, no target."""
    model = models.Masked(layers=2)
    model.drop.p = 0.0
    return Case(
        model=model.to(dtype), args=(torch.randn(batch, 7, 32, dtype=dtype),), loss_fn=lambda o: o.square().sum()
    )


def images(batch: int, dtype: torch.dtype) -> Case:
    """Slices, another memory format, frozen weights."""
    model = models.Layouts().to(dtype)
    model.left_conv.requires_grad_(False)
    x, y = torch.randn(batch, 3, 12, 12, dtype=dtype), torch.randint(5, (batch,))
    return Case(model=model, args=(x,), target=y, loss_fn=functional.cross_entropy)


class Skips(nn.Module):
    """Tensors that are read again several stages later, and one that is used three times."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.tanh(self.layers[0](x))
        y = first
        for layer in self.layers[1:3]:
            y = torch.tanh(layer(y))
        z = y * self.gate + first
        for layer in self.layers[3:]:
            z = torch.sigmoid(layer(z)) + first
        return z * self.gate, y


def skips(batch: int, dtype: torch.dtype) -> Case:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(output[0], target) + 0.1 * output[1].abs().mean()

    x, y = torch.randn(2, batch, 16, dtype=dtype)
    return Case(model=Skips().to(dtype), args=(x,), target=y, loss_fn=loss)


class Drawn(nn.Module):
    """A mask that is drawn with assignments, and a view of what is written over before the view is read."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1])
        mask[3:] = 1.0
        mask[0] = 2.0
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * mask
            if number == 1:
                total = torch.zeros_like(x)
                part = total[:, :4]
                total[:, 1:] = x[:, 1:].detach()
                x = x + part.mean(1, keepdim=True)
        return x


class Twins(nn.Module):
    """Weights that are sums of two: the gradients of both are one and the same tensor."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x = torch.tanh(functional.linear(x, left.weight + right.weight, left.bias) + right.bias)
        return x


def twins(batch: int, dtype: torch.dtype) -> Case:
    x, y = torch.randn(2, batch, 12, dtype=dtype)
    return Case(model=Twins().to(dtype), args=(x,), target=y, loss_fn=functional.mse_loss)


class Mixer(nn.Module):
    """Layers along two axes in turns, so gradients lie otherwise in memory than what they are gradients of.

    It clamps, and it does what models do beside computing: it logs, counts its use, and makes what nobody reads.
    """

    def __init__(self, tokens: int = 6, width: int = 10) -> None:
        super().__init__()
        self.across = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(2))
        self.along = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for across, along in zip(self.across, self.along, strict=True):
            torch._C._log_api_usage_once("tests.mixer")
            torch.arange(3)
            log.warning("a mixer mixes")
            x = x + functional.hardtanh(across(x.transpose(1, 2)).transpose(1, 2), -0.5, 0.5)
            x = torch.tanh(along(x)).clamp_min(-0.25)
        return self.head(x[:, 0])


def mixer(batch: int, dtype: torch.dtype) -> Case:
    x, y = torch.randn(batch, 6, 10, dtype=dtype), torch.rand(batch, 4, dtype=dtype)
    return Case(model=Mixer().to(dtype), args=(x,), target=y, loss_fn=functional.binary_cross_entropy_with_logits)


class Recurrent(nn.Module):
    """One layer again and again, between layers of their own."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.again = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.again(x))
            x = torch.sigmoid(layer(x))
        return x


def recurrent(batch: int, dtype: torch.dtype) -> Case:
    x, y = torch.randn(2, batch, 12, dtype=dtype)
    return Case(model=Recurrent().to(dtype), args=(x,), target=y, loss_fn=functional.mse_loss)


class Shifted(nn.Module):
    """Blocks that begin by adding a parameter; three stages begin with a block each."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.randn(width) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for shift, layer in zip(self.shifts, self.layers, strict=True):
            x = x + shift
            x = torch.tanh(layer(x)) + x
        return x


def shifted(batch: int, dtype: torch.dtype) -> Case:
    x, y = torch.randn(2, batch, 12, dtype=dtype)
    return Case(model=Shifted().to(dtype), args=(x,), target=y, loss_fn=functional.mse_loss)


class Words(nn.Module):
    """Few ops and tied weights at both ends, which are at different stages; inputs are small beside the rest."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def words(batch: int, dtype: torch.dtype) -> Case:
    x, y = torch.randint(40, (2, batch, 12))
    return Case(model=Words().to(dtype), args=(x,), target=y, loss_fn=tokens_loss)


def drawn(batch: int, dtype: torch.dtype) -> Case:
    x, y = torch.randn(2, batch, 12, dtype=dtype)
    return Case(model=Drawn().to(dtype), args=(x,), target=y, loss_fn=functional.mse_loss)


CASES = {
    "gpt": gpt,
    "ignored": some_ignored,
    "size": own_size,
    "own": own_loss,
    "masked": masked,
    "images": images,
    "skips": skips,
    "drawn": drawn,
    "twins": twins,
    "mixer": mixer,
    "recurrent": recurrent,
}


LOSSES = ("ignored", "size")
"""Cases of plain models, or those of others, with a loss that micro-batches make less simple."""


def baseline_step(case: Case) -> Tensor:
    """The unpipelined step; gradients stay in the model."""
    output = case.model(*case.args, **case.kwargs)
    if case.loss_fn is None:
        loss = output["loss"]
    else:
        loss = case.loss_fn(output) if case.target is None else case.loss_fn(output, case.target)
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of a model, which loses them."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found
