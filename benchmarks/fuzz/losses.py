"""Losses: every one of `torch.nn.functional`, and some as people write them, over any form of output."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["FORMS", "LOSSES", "Loss", "Pair", "output_of"]

Pair = namedtuple("Pair", ["logits", "mean"])
Function = Callable[["Loss", torch.Tensor, torch.Tensor], torch.Tensor]

FORMS = ("tensor", "tensor", "tensor", "tuple", "dict", "named tuple", "list", "own loss")
"""What a model returns."""


def output_of(form: str, logits: torch.Tensor, features: torch.Tensor) -> Any:
    """A model's output in one of the forms."""
    match form:
        case "tuple":
            return logits, features.mean()
        case "dict":
            return {"logits": logits, "more": [features.square().mean(), {"deep": logits.sum()}], "count": 3}
        case "named tuple":
            return Pair(logits, features.detach().mean())
        case "list":
            return [logits, logits * 2]
        case "own loss":
            return {"loss": logits.square().mean(), "logits": logits}
    return logits


def _ctc(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    frames = F.log_softmax(o, -1)[None].expand(2, -1, -1)
    batch, classes = o.shape
    targets = y[:batch, None] % (classes - 1) + 1
    return F.ctc_loss(frames, targets, (2,) * batch, (1,) * batch, zero_infinity=True)


def _centred(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss with a state of its own that moves, as DINO's centre does."""
    value = F.cross_entropy(o - self.centre[: o.shape[-1]].to(o.dtype), y)
    self.centre[: o.shape[-1]].mul_(0.9).add_(o.detach().float().mean(0), alpha=0.1)
    self.calls += 1
    return value


def _hard_examples(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return each[each > each.mean()].mean()


def _by_value(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    value = F.mse_loss(o, torch.zeros_like(o))
    assert torch.isfinite(value), "the loss is not finite"
    return value * 2 if value.item() > 1 else value


def _contrast(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(o, dim=-1)
    return F.cross_entropy(z @ z.t() / 0.2, torch.arange(len(z), device=o.device).roll(1))


def _dice(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    shares, aim = o.softmax(-1), F.one_hot(y, o.shape[-1]).to(o.dtype)
    return 1 - (2 * (shares * aim).sum(0) / (shares.sum(0) + aim.sum(0) + 1e-3)).mean()


def _focal(self: Loss, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def _signs(o: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(o).copysign(torch.arange(o.shape[-1], dtype=o.dtype, device=o.device) % 2 - 0.5)


LOSSES: MappingProxyType[str, Function] = MappingProxyType(
    {
        "cross entropy": lambda self, o, y: F.cross_entropy(o, y),
        "smoothed cross entropy": lambda self, o, y: F.cross_entropy(o, y, label_smoothing=0.1),
        "weighted cross entropy": lambda self, o, y: F.cross_entropy(
            o, y.where(y > 0, -100), weight=torch.linspace(0.5, 1.5, o.shape[-1], dtype=o.dtype, device=o.device)
        ),
        "soft cross entropy": lambda self, o, y: F.cross_entropy(o, torch.full_like(o, 1 / o.shape[-1])),
        "nll": lambda self, o, y: F.nll_loss(F.log_softmax(o, -1), y),
        "mse": lambda self, o, y: F.mse_loss(o, torch.zeros_like(o)),
        "l1": lambda self, o, y: F.l1_loss(o, torch.full_like(o, 0.3)),
        "smooth l1": lambda self, o, y: F.smooth_l1_loss(o, torch.ones_like(o)),
        "huber": lambda self, o, y: F.huber_loss(o, torch.ones_like(o), delta=0.5),
        "kl": lambda self, o, y: F.kl_div(
            F.log_softmax(o, -1), torch.full_like(o, 1 / o.shape[-1]), reduction="batchmean"
        ),
        "bce": lambda self, o, y: F.binary_cross_entropy(o.float().sigmoid(), torch.full_like(o, 0.3).float()),
        "bce with logits": lambda self, o, y: F.binary_cross_entropy_with_logits(o, torch.full_like(o, 0.3)),
        "poisson": lambda self, o, y: F.poisson_nll_loss(o.clamp(max=3), torch.ones_like(o)),
        "gaussian": lambda self, o, y: F.gaussian_nll_loss(o, torch.zeros_like(o), o.square() + 0.5),
        "ctc": _ctc,
        "cosine": lambda self, o, y: F.cosine_embedding_loss(o, torch.ones_like(o), torch.ones_like(o[:, 0])),
        "ranking": lambda self, o, y: F.margin_ranking_loss(o, o.roll(1, 0).detach(), _signs(o), margin=0.1),
        "hinge": lambda self, o, y: F.hinge_embedding_loss(o, _signs(o)),
        "multi margin": lambda self, o, y: F.multi_margin_loss(o, y),
        "multilabel margin": lambda self, o, y: F.multilabel_margin_loss(
            o, torch.stack([y, *[torch.full_like(y, -1)] * (o.shape[-1] - 1)], 1)
        ),
        "multilabel soft margin": lambda self, o, y: F.multilabel_soft_margin_loss(o, torch.full_like(o, 0.5)),
        "soft margin": lambda self, o, y: F.soft_margin_loss(o, _signs(o)),
        "triplet": lambda self, o, y: F.triplet_margin_loss(o, o.detach() * 0.5, torch.ones_like(o)),
        "triplet by distance": lambda self, o, y: F.triplet_margin_with_distance_loss(
            o, o.roll(1, 0), torch.ones_like(o), distance_function=lambda a, b: (a - b).abs().mean(-1)
        ),
        "product": lambda self, o, y: (o * o.cos()).sum() / o.numel(),
        "sum": lambda self, o, y: o.sum() * 0.01,
        "centred": _centred,
        "hard examples": _hard_examples,
        "by value": _by_value,
        "contrast": _contrast,
        "dice": _dice,
        "focal": _focal,
    }
)


class Loss:
    """A loss over a model's output, with targets it closes over and perhaps a state.

    Attributes:
        name: of the function, in `LOSSES`.
        form: of the output.
        targets: class indices, more than there are rows.
        centre: state of the losses that have one.
        calls: how often such a loss was called.
    """

    def __init__(self, name: str, form: str, targets: torch.Tensor) -> None:
        self.name, self.form, self.targets = name, form, targets
        self.centre = torch.zeros(64)
        self.calls = 0

    def __call__(self, output: Any) -> torch.Tensor:
        more: torch.Tensor | float = 0.0
        match self.form:
            case "tuple":
                logits, mean = output
                more = 0.1 * mean
            case "dict":
                logits = output["logits"]
                more = 0.1 * output["more"][0] + 0.01 * output["more"][1]["deep"]
            case "named tuple":
                logits = output.logits
            case "list":
                logits, twice = output
                more = 0.1 * twice.square().mean()
            case "own loss":
                return output["loss"]
            case _:
                logits = output
        rows = logits.flatten(0, -2)
        return LOSSES[self.name](self, rows, self.targets[: len(rows)] % rows.shape[-1]) + more
